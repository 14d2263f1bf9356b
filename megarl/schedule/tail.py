"""Lookahead and staleness cap that a run needs, from how long its groups took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from megarl.schedule.policy import Late, SchedulePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TailStats:
    """How long groups took from their submission to their last sample, in steps.

    A step is the larger of a step's generation with busy engines and its training: what an asynchronous step would
    take. Waiting time in the queue of an engine that has more groups than it needs does not count.

    >>> tail = TailStats.of([60, 60, 80, 240], step_seconds=60, train_seconds=50)
    >>> tail.mean_steps, tail.max_steps, tail.needed_lookahead, tail.needed_staleness
    (1.8333333333333333, 4.0, 3, 4)
    """

    mean_steps: float
    """W, the mean over the groups."""
    max_steps: float
    """W_max, of the slowest group."""
    train_steps: float
    """Time of one training step."""

    @classmethod
    def of(cls, group_seconds: Sequence[float], *, step_seconds: float, train_seconds: float) -> TailStats:
        """Return the statistics of groups that took `group_seconds`, of which there is at least one."""
        if not group_seconds or step_seconds <= 0:
            raise ValueError(
                f"a tail needs at least one group and steps longer than 0 s, got {len(group_seconds)} groups and "
                f"{step_seconds:g} s"
            )
        return cls(
            mean_steps=sum(group_seconds) / len(group_seconds) / step_seconds,
            max_steps=max(group_seconds) / step_seconds,
            train_steps=train_seconds / step_seconds,
        )

    @property
    def needed_lookahead(self) -> int:
        """The smallest lookahead L that keeps the engines busy: L + 1 >= W + training + 1.

        The batches in these terms are being generated, leased, and ready. A rule of thumb, not a bound.
        """
        return ceil(self.mean_steps + self.train_steps)

    @property
    def needed_staleness(self) -> int:
        """The smallest cap eta, at least L, at which no step waits for a group: W_max <= eta.

        Step a + eta + 1 is the last one that may train a group of version a, and takes its batch eta steps after the
        push of version a.
        """
        return max(self.needed_lookahead, ceil(self.max_steps))

    @property
    def line(self) -> str:
        """One line with the durations and with what they need."""
        return (
            f"groups take {self.mean_steps:.2f} steps on average and {self.max_steps:.2f} at most: asynchronous steps "
            f"need lookahead {self.needed_lookahead} and max_staleness {self.needed_staleness}"
        )

    def warnings(self, policy: SchedulePolicy) -> Iterator[str]:
        """Yield a sentence for each setting with which steps would wait."""
        if policy.lookahead < self.needed_lookahead:
            yield (
                f"schedule.lookahead needs {self.needed_lookahead} to keep the engines busy, got {policy.lookahead}: "
                f"groups take {self.mean_steps:.2f} steps on average and training {self.train_steps:.2f}"
            )
        if policy.late is Late.WAIT and policy.max_staleness < ceil(self.max_steps):
            yield (
                f"schedule.max_staleness needs {ceil(self.max_steps)} so that no step waits for a group, got "
                f"{policy.max_staleness}: the slowest group took {self.max_steps:.2f} steps; with schedule.late: "
                "mask no step waits, and its oldest tokens leave the loss"
            )
