"""The report of the chaos benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.chaos.compare import COMPARED, Comparison
from benchmarks.chaos.disturb import InjectionResult, Kill


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """Results of one disturbed run and its comparison."""

    kills: int
    """Number of kills carried out."""
    by_target: dict[str, int]
    by_phase: dict[str, int]
    """Number of kills by phase of the run; `recovery`: while it recovered from the previous kill."""
    recovered: int
    """Kills after which the run resumed by itself and finished a step that began afterwards, or the whole run."""
    bitwise_equal: bool
    prompts_lost: int
    prompts_repeated: int
    trajectories_repeated: int
    recovery_seconds_p50: float | None
    """From the kill to the end of the first step that began after it; None if no kill was recovered from."""
    recovery_seconds_max: float | None
    orphans: int
    """Number of processes and unmapped shared-memory files that outlived the run."""
    recovery_seconds_by_target: dict[str, float]
    """Median recovery time by target."""
    kills_asked: int
    restarts: int
    """Number of restarts of the command."""
    steps: int
    seed: int
    seconds_undisturbed: float
    seconds_disturbed: float
    compared: tuple[str, ...]
    differences: list[str]
    orphan_names: list[str]
    failures: list[str]
    """Reason and log tail of each failure of the command."""

    @property
    def is_clean(self) -> bool:
        """Whether all kills were carried out and recovered from, and none lost or changed anything."""
        lost = self.prompts_lost + self.prompts_repeated + self.trajectories_repeated + self.orphans
        return self.bitwise_equal and self.recovered == self.kills == self.kills_asked and not lost


def make_report(
    disturbed: InjectionResult,
    comparison: Comparison,
    *,
    orphans: Sequence[str],
    kills_asked: int,
    steps: int,
    seed: int,
    seconds_undisturbed: float,
) -> ChaosReport:
    """Combine the outcome of the disturbed run and the comparison into a report."""
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
