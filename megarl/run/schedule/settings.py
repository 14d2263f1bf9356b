"""What distinguishes one schedule from another: six settings of the same state machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.rollout import ScheduleConfig
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import ceil


def version_of(label: int, skipped: AbstractSet[int]) -> int:
    """Return the newest version with the weights that the engines label `label`.

    Args:
        skipped: versions without an update of their own: their weights and label are those of the version before.

    Examples:
        >>> version_of(2, {3, 4}), label_of(4, {3, 4})
        (4, 2)
    """
    while label + 1 in skipped:
        label += 1
    return label


def label_of(version: int, skipped: AbstractSet[int]) -> int:
    """Return the label of the tokens that engines sample with a version; the inverse of `version_of`."""
    while version in skipped:
        version -= 1
    return version


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStaleness:
    """Staleness of the sampled tokens of one step.

    Examples:
        >>> tokens = token_staleness(step=6, num_tokens_by_version={5: 70, 4: 20, 2: 10}, max_staleness=2)
        >>> tokens.mean, tokens.worst, tokens.masked_fraction
        (0.2222222222222222, 1, 0.1)
    """

    num_tokens: Mapping[int, int]
    """Staleness -> number of tokens trained on, in ascending order."""
    num_masked: int
    """Number of tokens above the cap, which are not trained on."""

    @property
    def num_trained(self) -> int:
        """Number of tokens trained on."""
        return sum(self.num_tokens.values())

    @property
    def mean(self) -> float:
        """Mean over the tokens trained on; 0 without any."""
        return sum(staleness * num for staleness, num in self.num_tokens.items()) / max(1, self.num_trained)

    @property
    def worst(self) -> int:
        """Largest staleness of a token trained on; 0 without any."""
        return max(self.num_tokens, default=0)

    @property
    def masked_fraction(self) -> float:
        """Share of the tokens that are above the cap."""
        return self.num_masked / max(1, self.num_trained + self.num_masked)

    def metrics(self) -> dict[str, float]:
        """Return mean, maximum, share of masked tokens, and the share of the trained tokens of each staleness."""
        shares = {f"staleness/share_{s}": num / self.num_trained for s, num in self.num_tokens.items()}
        return {
            "staleness/mean": self.mean,
            "staleness/max": self.worst,
            "staleness/masked": self.masked_fraction,
            **shares,
        }


def token_staleness(step: int, num_tokens_by_version: Mapping[int, int], max_staleness: int) -> TokenStaleness:
    """Return the staleness of tokens that step `step` trains on; the weights before its update are version step - 1.

    Args:
        num_tokens_by_version: version that sampled the tokens -> number of tokens.
        max_staleness: tokens above it are counted as masked.
    """
    by_staleness = {step - 1 - version: num for version, num in num_tokens_by_version.items()}
    trained = {staleness: num for staleness, num in sorted(by_staleness.items()) if staleness <= max_staleness}
    return TokenStaleness(num_tokens=trained, num_masked=sum(by_staleness.values()) - sum(trained.values()))


class Late(StrEnum):
    """What happens to a group that cannot be trained within the staleness cap."""

    WAIT = "wait"
    """It cannot happen: a step waits until its batch leaves every other group enough time."""
    MASK = "mask"
    """Steps never wait for it. Its tokens above the cap leave the loss; its other tokens and its reward count."""
    DROP = "drop"
    """It is discarded once it is above the cap, and another one takes its place."""


class Update(StrEnum):
    """How the engines receive new weights while groups are unfinished."""

    DRAIN = "drain"
    """The push waits until no group is unfinished."""
    RETRACT = "retract"
    """Generation pauses; the new weights recompute the prefixes, and the requests continue."""
    IN_PLACE = "in_place"
    """Generation continues on the KV cache of the old weights."""
    ABORT = "abort"
    """Requests are aborted and continued by new ones that begin with the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePolicy:
    """The rules of one schedule.

    Examples:
        >>> SchedulePolicy(lookahead=4, max_staleness=2)
        Traceback (most recent call last):
        ValueError: lookahead needs to be at most max_staleness, got 4 > 2
    """

    lookahead: int = 0
    """L, the number of batches that may be open besides the current one. It determines the mean staleness."""
    max_staleness: int = 0
    """The cap eta: a token trained in step t is sampled by version t - 1 - eta or a later one."""
    late: Late = Late.WAIT
    """What happens to a group that cannot meet the cap."""
    update: Update = Update.RETRACT
    """How weights are pushed while groups are unfinished."""
    in_order: bool = False
    """Batches take groups in the order of their ordinals, whichever finish first."""
    adapt_lookahead: bool = False
    """Finished groups beyond a batch, which may be leased, take up the places of as many that are not admitted yet."""

    def __post_init__(self) -> None:
        if self.lookahead < 0:
            raise ValueError(f"lookahead needs to be at least 0, got {self.lookahead}")
        if self.lookahead > self.max_staleness:
            raise ValueError(
                f"lookahead needs to be at most max_staleness, got {self.lookahead} > {self.max_staleness}"
            )

    @classmethod
    def of(cls, config: ScheduleConfig) -> SchedulePolicy:
        """Return the policy of the section `schedule`."""
        settings = config.resolved().model_dump(exclude={"type"})
        late, update = Late(settings.pop("late")), Update(settings.pop("update"))
        return cls(**settings, late=late, update=update, in_order=config.type != "async")

    def deadline(self, version: int) -> int:
        """Return the last step that may train a group admitted at `version`."""
        return version + self.max_staleness + 1

    def oldest_version(self, step: int) -> int:
        """Return the oldest version whose tokens step `step` may train; it may be negative."""
        return step - 1 - self.max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class TailStats:
    """How long groups took from their submission to their last sample, in steps.

    A step is the larger of a step's generation with busy engines and its training: what an asynchronous step would
    take. Waiting time in the queue of an engine that has more groups than it needs does not count.

    Examples:
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
