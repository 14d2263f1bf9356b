"""Compares two trainers on a workload: alternating runs, medians, and a check that they sampled the same lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.end_to_end.timed_run import TimedRun

Run = Callable[[int], TimedRun]
"""Runs a trainer, given the number of the run."""

SIGNIFICANCE = 1.95
"""Factor of the Kolmogorov-Smirnov test at a level of 0.001."""

SMALL_DISTANCE = 0.03
"""Distance that is not reported as a difference. The test supposes independent samples: the completions of a prompt are
not, and each trainer draws its own prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadReport:
    """The result of one workload."""

    megarl_seconds: float
    """Median over runs of the median step."""
    peer_seconds: float
    """The same of the peer."""
    ratio: float
    """`peer_seconds` over `megarl_seconds`: above 1, megarl is faster."""
    ratios: tuple[float, ...]
    """Ratio of each pair of runs, ascending."""
    peer_batch_size: int
    """The peer's fastest batch size."""
    megarl_length: float
    """Mean number of sampled tokens of a completion."""
    peer_length: float
    """The same of the peer."""
    length_distance: float
    """Kolmogorov-Smirnov distance of the two distributions of lengths."""
    phases: Mapping[str, float]
    """megarl's seconds of a step by phase, medians."""
    processor_seconds: Mapping[str, float]
    """CPU seconds of a step by kind of megarl's processes, medians over runs."""


def compare(megarl: Run, peer: Run, num_runs: int, *, batch_size: int, notify: Callable[[str], None]) -> WorkloadReport:
    """Run both trainers `num_runs` times in turn, each first in every other pair, and return medians.

    Args:
        batch_size: the peer's, for the report.

    Raises:
        ArithmeticError: the lengths of completions differ by more than chance.
    """
    ours: list[TimedRun] = []
    theirs: list[TimedRun] = []
    for number in range(num_runs):
        pair = [(ours, megarl, "megarl"), (theirs, peer, "peer")]
        for runs, run, name in pair if number % 2 == 0 else reversed(pair):
            runs.append(run(number))
            notify(f"run {number + 1}/{num_runs}, {name}: {median(runs[-1].seconds):.2f} s a step")
    seconds, peer_seconds = ([median(run.seconds) for run in runs] for runs in (ours, theirs))
    lengths, peer_lengths = (np.concatenate([run.lengths for run in runs]) for runs in (ours, theirs))
    return WorkloadReport(
        megarl_seconds=median(seconds),
        peer_seconds=median(peer_seconds),
        ratio=median(peer_seconds) / median(seconds),
        ratios=tuple(sorted(b / a for a, b in zip(seconds, peer_seconds, strict=True))),
        peer_batch_size=batch_size,
        megarl_length=float(lengths.mean()),
        peer_length=float(peer_lengths.mean()),
        length_distance=require_equal_lengths(lengths, peer_lengths),
        phases=_medians([run.phases for run in ours]),
        processor_seconds=_medians([run.processor_seconds for run in ours]),
    )


def _medians(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(values[name] for values in measured if name in values) for name in measured[0]}


def fastest(batch_sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """Return the batch size with the fewest seconds a step."""
    return min(batch_sizes, key=seconds)


def require_equal_lengths(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples.

    Raises:
        ArithmeticError: the distance is above `SMALL_DISTANCE`, and independent samples of one distribution would be
            that far apart in fewer than 1 of 1,000 cases.
    """
    points = np.union1d(first, second)
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (first, second)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    limit = max(SMALL_DISTANCE, SIGNIFICANCE * float(np.sqrt(1 / len(first) + 1 / len(second))))
    if distance > limit:
        raise ArithmeticError(
            f"the trainers sampled completions of different lengths, of mean {first.mean():.1f} and "
            f"{second.mean():.1f}: the distributions are {distance:.3f} apart, more than {limit:.3f}"
        )
    return distance
