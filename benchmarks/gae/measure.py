"""Measures a kernel and its loop alternately in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

from torch import Tensor

from benchmarks.gae.loops import gae_over_lists, gae_over_positions, gae_over_tensors, pad, unpad
from benchmarks.gae.workload import KernelWorkload
from megarl.functional import gae

GAMMA = 0.999

LOOPS = ("tensors", "lists", "positions")
"""What loops iterate over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """Results of one kernel and one loop on one workload."""

    kernel: str
    loop: str
    """What the loop iterates over: one of `LOOPS`."""
    workload: str
    tokens: int
    tokens_in_mask: int
    sequences: int
    longest: int
    """Number of tokens of the longest sequence."""
    pairs: int
    """Number of times that loop and kernel ran in turn."""
    loop_ms: float
    """Median time of the loop in milliseconds."""
    vectorised_ms: float
    ratio: float
    """Median over pairs of the loop's time divided by the kernel's."""
    ratio_worst: float
    """Smallest of the ratios of all pairs."""
    largest_difference: float
    """Largest absolute difference between the results, relative to the largest result."""


def measure(workload: KernelWorkload, *, loop: str, pairs: int) -> KernelReport:
    """Time `gae` and one of `LOOPS`, and compare their results."""
    args = (workload.rewards_T, workload.values_T, workload.mask_T, workload.cu_seqlens_S)
    slow, fast = _prepare_loop(workload, loop), partial(gae, *args, gamma=GAMMA, lam=workload.lam)
    runs = [(_time_call(slow), _time_call(fast)) for _ in range(pairs)]
    times = [(slow_seconds, fast_seconds) for (slow_seconds, _), (fast_seconds, _) in runs]
    ratios = [slow_seconds / fast_seconds for slow_seconds, fast_seconds in times]
    (_, want), (_, got) = runs[0]
    if loop == "positions":
        advantages_SL, returns_SL = want
        want = unpad(advantages_SL, workload.cu_seqlens_S), unpad(returns_SL, workload.cu_seqlens_S)
    return KernelReport(
        kernel="gae",
        loop=loop,
        workload=workload.name,
        tokens=len(workload.mask_T),
        tokens_in_mask=int(workload.mask_T.sum()),
        sequences=len(workload.cu_seqlens_S) - 1,
        longest=int(workload.cu_seqlens_S.diff().max()),
        pairs=pairs,
        loop_ms=1e3 * median(seconds for seconds, _ in times),
        vectorised_ms=1e3 * median(seconds for _, seconds in times),
        ratio=median(ratios),
        ratio_worst=min(ratios),
        largest_difference=max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)),
    )


def _prepare_loop(workload: KernelWorkload, loop: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return the loop over a workload; a batch for the loop over positions is padded beforehand."""
    tokens = (workload.rewards_T, workload.values_T, workload.mask_T)
    if loop == "positions":
        padded = (pad(x_T, workload.cu_seqlens_S) for x_T in tokens)
        return partial(gae_over_positions, *padded, gamma=GAMMA, lam=workload.lam)
    function = {"tensors": gae_over_tensors, "lists": gae_over_lists}[loop]
    return partial(function, *tokens, workload.cu_seqlens_S, gamma=GAMMA, lam=workload.lam)


def _time_call(function: Callable[[], tuple[Tensor, Tensor]]) -> tuple[float, tuple[Tensor, Tensor]]:
    """Return the seconds that the call took, and its result."""
    started = perf_counter()
    result = function()
    return perf_counter() - started, result
