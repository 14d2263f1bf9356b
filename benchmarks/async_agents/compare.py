"""The comparison of the two runs with its targets."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.async_agents.run import ScheduleReport

MIN_RATIO = 1.8
MAX_REWARD_DIFFERENCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A synchronous and an asynchronous run with the same settings."""

    sync: ScheduleReport
    asynchronous: ScheduleReport

    @property
    def ratio(self) -> float:
        """Steps per second of the asynchronous run over those of the synchronous one."""
        return self.asynchronous.steps_per_second / self.sync.steps_per_second

    @property
    def reward_difference(self) -> float:
        """Held-out reward of the asynchronous run minus that of the synchronous one."""
        return self.asynchronous.held_out - self.sync.held_out

    @property
    def reaches_target(self) -> bool:
        """Whether asynchronous steps are as much faster as they need to be, at an equal reward."""
        return self.ratio >= MIN_RATIO and abs(self.reward_difference) <= MAX_REWARD_DIFFERENCE
