"""What a benchmark has found out, in one object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.chaos.compare import COMPARED, Comparison
from benchmarks.chaos.disturb import Disturbed, Kill


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """Of one disturbed run."""

    kills: int
    """That were made."""
    by_target: dict[str, int]
    by_phase: dict[str, int]
    """What the run was doing; `recovery`: coming back from the kill before."""
    recovered: int
    """Kills after which the run went on by itself: a step that began afterwards has ended, or the run has."""
    bitwise_equal: bool
    prompts_lost: int
    prompts_repeated: int
    trajectories_repeated: int
    recovery_seconds_p50: float | None
    """From the kill to the end of the first step that began after it; None: no kill was recovered from."""
    recovery_seconds_max: float | None
    orphans: int
    """Processes and unmapped shared memory that outlived the run."""
    recovery_seconds_by_target: dict[str, float]
    """Medians."""
    kills_asked: int
    restarts: int
    """Of the whole command."""
    steps: int
    seed: int
    seconds_undisturbed: float
    seconds_disturbed: float
    compared: tuple[str, ...]
    differences: list[str]
    orphan_names: list[str]
    failures: list[str]
    """Last words of commands that ended with an error."""

    @property
    def is_clean(self) -> bool:
        """Nothing was lost by any kill, and all were made."""
        lost = self.prompts_lost + self.prompts_repeated + self.trajectories_repeated + self.orphans
        return self.bitwise_equal and self.recovered == self.kills == self.kills_asked and not lost


def make_report(
    disturbed: Disturbed,
    comparison: Comparison,
    *,
    orphans: Sequence[str],
    kills_asked: int,
    steps: int,
    seed: int,
    seconds_undisturbed: float,
) -> ChaosReport:
    """All that is told."""
    seconds = [kill.seconds for kill in disturbed.kills if kill.seconds is not None]
    return ChaosReport(
        kills=len(disturbed.kills),
        by_target=dict(sorted(Counter(kill.target for kill in disturbed.kills).items())),
        by_phase=dict(sorted(Counter(kill.phase for kill in disturbed.kills).items())),
        recovered=sum(kill.recovered for kill in disturbed.kills),
        bitwise_equal=comparison.bitwise_equal,
        prompts_lost=comparison.prompts_lost,
        prompts_repeated=comparison.prompts_repeated,
        trajectories_repeated=comparison.trajectories_repeated,
        recovery_seconds_p50=round(median(seconds), 2) if seconds else None,
        recovery_seconds_max=round(max(seconds), 2) if seconds else None,
        recovery_seconds_by_target=_by_target(disturbed.kills),
        orphans=len(orphans),
        kills_asked=kills_asked,
        restarts=disturbed.restarts,
        steps=steps,
        seed=seed,
        seconds_undisturbed=round(seconds_undisturbed, 1),
        seconds_disturbed=round(disturbed.seconds, 1),
        compared=COMPARED,
        differences=comparison.differences,
        orphan_names=list(orphans),
        failures=disturbed.failures,
    )


def _by_target(kills: Sequence[Kill]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for kill in kills:
        if kill.seconds is not None:
            seconds.setdefault(kill.target, []).append(kill.seconds)
    return {target: round(median(seconds[target]), 2) for target in sorted(seconds)}
