"""Chooses prompts by their pass rate: which groups are trained on, and which rows are not sampled any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megarl.batch.trajectory import Prompt
from megarl.config.data import DifficultyConfig
from megarl.groups.group_stream import FinishedGroup


@dataclass(slots=True)
class SolvedRows:
    """State of a run that belongs to its checkpoints."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    """Prompt id -> number of groups, without interruption until the last one, whose completions have all passed."""


class DifficultyGate:
    """Applies `data.difficulty`. The pass rate of a group is the share of its completions that pass."""

    def __init__(self, config: DifficultyConfig, term: str) -> None:
        """`term`: name of the reward term, where the configuration names none."""
        self._config, self._term = config, config.term or term
        self.max_batches = config.max_batches
        self.solved = SolvedRows()

    def keep(self, group: FinishedGroup) -> bool:
        """Return whether to train on the group; True for one of a source without the term."""
        rate = self.pass_rate(group)
        return rate is None or self._config.min_pass_rate <= rate <= self._config.max_pass_rate

    def pass_rate(self, group: FinishedGroup) -> float | None:
        """Return the pass rate of a group; None if its source is not scored by the term."""
        kept = [group.summary.trajectories[i] for i in group.summary.kept]
        values = [t.rewards[self._term] for t in kept if self._term in t.rewards]
        return sum(value >= self._config.pass_reward for value in values) / len(values) if values else None

    def record(self, groups: Iterable[FinishedGroup]) -> None:
        """Count the groups whose completions have all passed."""
        for group in groups:
            name, rate = group.summary.prompt_id, self.pass_rate(group)
            if rate == 1:
                self.solved.in_a_row[name] = self.solved.in_a_row.get(name, 0) + 1
            elif rate is not None:
                self.solved.in_a_row.pop(name, None)

    def is_retired(self, prompt: Prompt) -> bool:
        """Return whether the prompt is not sampled any more."""
        limit = self._config.retire_after
        return limit is not None and self.solved.in_a_row.get(prompt.prompt_id, 0) >= limit

    @property
    def num_retired(self) -> int:
        """Number of prompts that are not sampled any more."""
        limit = self._config.retire_after
        return 0 if limit is None else sum(num >= limit for num in self.solved.in_a_row.values())

    def metrics(self, groups: Iterable[FinishedGroup]) -> dict[str, float]:
        """Return the mean pass rate of sampled groups, the share that is kept, and the number of retired prompts."""
        groups = list(groups)
        rates = [rate for group in groups if (rate := self.pass_rate(group)) is not None]
        metrics = {"difficulty/retired": float(self.num_retired)} if self._config.retire_after is not None else {}
        if rates:
            metrics["difficulty/pass_rate"] = sum(rates) / len(rates)
            metrics["difficulty/kept"] = sum(map(self.keep, groups)) / len(groups)
        return metrics
