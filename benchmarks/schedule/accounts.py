"""What a simulated or scripted run has done: step times, staleness, waste and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.schedule.cases import Case
from benchmarks.schedule.workload import Workload
from megarl.run.schedule.settings import Late, token_staleness

WARM_UP = 0.2
"""Share of the steps, at the beginning, that do not count."""
TOKENS_PER_SECOND = 1_000_000
"""Tokens that a slot generates in the time 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One schedule on one tail."""

    tail: str
    schedule: str
    steps: int
    step_over_bound: float
    """Mean time of a step, divided by the larger of generation and training."""
    worst_staleness: int
    """Largest staleness of a token trained on."""
    mean_staleness: float
    """Mean over the tokens trained on."""
    mean_group_staleness: float
    """Mean over the groups, by the oldest token of each."""
    wasted_fraction: float
    """Share of the generated tokens that belong to discarded groups."""
    masked_fraction: float
    """Share of the tokens of the batches that are above the cap and left out."""
    group_steps_mean: float
    """W: mean time from a group's admission to its last sample, in steps."""
    group_steps_max: float
    length_ratio: float
    """Mean length of the trained groups, divided by that of the admitted ones."""
    open_groups: int
    """Groups admitted, and neither trained on nor discarded, at the end."""


@dataclass(slots=True, kw_only=True)
class Accounts:
    """Adds up the events of a run."""

    case: Case
    workload: Workload
    num_steps: int = 0
    lengths: dict[int, float] = field(default_factory=dict)
    """Ordinal -> length of the group, of all admitted ones."""
    trained: set[int] = field(default_factory=set)
    num_dropped: int = 0
    num_tokens: Counter[int] = field(default_factory=Counter)
    """Staleness -> number of tokens trained on."""
    num_masked: int = 0
    num_wasted: int = 0
    group_staleness: Counter[int] = field(default_factory=Counter)
    group_seconds: list[float] = field(default_factory=list)
    push_times: list[float] = field(default_factory=list)

    def admit(self, ordinal: int, length: float) -> None:
        """Count a group that was admitted."""
        self.lengths[ordinal] = length

    def finish(self, seconds: float) -> None:
        """Count a group that finished so long after its admission."""
        if self._counts:
            self.group_seconds.append(seconds)

    def lease(self, step: int, seconds: Mapping[int, Mapping[int, float]], group_staleness: Counter[int]) -> None:
        """Count the batch of a step.

        Args:
            seconds: ordinal -> version -> time that slots have spent on the group with this version.
        """
        self.trained |= seconds.keys()
        if not self._counts:
            return
        num_by_version = Counter[int]()
        for by_version in seconds.values():
            num_by_version.update({v: round(t * TOKENS_PER_SECOND) for v, t in by_version.items()})
        num_by_version = +num_by_version  # without versions that rounded to no token
        masks = self.case.policy.late is Late.MASK and self.case.masks
        max_staleness = self.case.policy.max_staleness if masks else step
        tokens = token_staleness(step, num_by_version, max_staleness)
        self.num_tokens.update(tokens.num_tokens)
        self.num_masked += tokens.num_masked
        self.group_staleness += group_staleness

    def drop(self, num_groups: int, seconds: float) -> None:
        """Count discarded groups on which slots have spent a time."""
        self.num_dropped += num_groups
        if self._counts:
            self.num_wasted += round(seconds * TOKENS_PER_SECOND)

    def push(self, now: float) -> None:
        """Count the end of a step."""
        self.num_steps += 1
        self.push_times.append(now)

    @property
    def _counts(self) -> bool:
        return self.num_steps >= WARM_UP * self.workload.num_steps

    def report(self, tail: str, schedule: str) -> Report:
        """Return the report of a run that has ended."""
        first = int(WARM_UP * self.num_steps) - 1
        step = (self.push_times[-1] - self.push_times[first]) / (self.num_steps - 1 - first)
        num_trained = self.num_tokens.total()
        num_groups = max(1, self.group_staleness.total())
        trained_mean = sum(self.lengths[ordinal] for ordinal in self.trained) / len(self.trained)
        return Report(
            tail=tail,
            schedule=schedule,
            steps=self.num_steps,
            step_over_bound=round(step / self.workload.bound, 4),
            worst_staleness=max(self.num_tokens),
            mean_staleness=round(sum(s * n for s, n in self.num_tokens.items()) / num_trained, 3),
            mean_group_staleness=round(sum(s * n for s, n in self.group_staleness.items()) / num_groups, 3),
            wasted_fraction=round(self.num_wasted / (self.num_wasted + num_trained + self.num_masked), 5),
            masked_fraction=round(self.num_masked / (num_trained + self.num_masked), 5),
            group_steps_mean=round(sum(self.group_seconds) / len(self.group_seconds) / step, 2),
            group_steps_max=round(max(self.group_seconds) / step, 2),
            length_ratio=round(trained_mean / (sum(self.lengths.values()) / len(self.lengths)), 4),
            open_groups=len(self.lengths) - len(self.trained) - self.num_dropped,
        )
