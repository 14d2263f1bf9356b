"""Checks, counts and times the implementations of a case."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernels.cases import Case, Results
from benchmarks.kernels.rooflines import Roofline
from megarl_kernels.backend import VARIABLE, uses_triton

TIMED_RUNS = 20
TIMED_SECONDS = 1.0
"""Runs that together take longer are enough."""

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports on stderr that it starts and stops


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """Results of one implementation of one op."""

    op: str
    workload: str
    implementation: str
    """`megarl`, and in brackets what it ran: `triton` or `reference`; or the name of another."""
    min_bytes: int
    """Bytes of inputs and outputs, once each."""
    counted_bytes: int | None
    """Bytes that PyTorch operations read and wrote; None where kernels are not PyTorch operations."""
    flops: int
    peak_bytes: int
    """Most memory that a run had allocated, results included."""
    milliseconds: float | None
    """Median time on a GPU; None on a CPU."""
    roofline_fraction: float | None
    """Least time for `min_bytes` and `flops` on this GPU, divided by the time; None without a known GPU."""
    largest_difference: float | None
    """From `torch`, relative to the largest magnitude of each result; None if the results are other ones."""


def measure(case: Case, device: str, roofline: Roofline | None) -> Iterator[KernelReport]:
    """Yield a report for each implementation; on CUDA also for the references of megarl's ops.

    Raises:
        ArithmeticError: the results of an implementation differ by more than the case allows.
    """
    want = tuple(x.detach().clone() for x in case.implementations["torch"]())
    for name, backend, function in _runs(case, device):
        with _kernels(backend):
            got = function()
            difference = _difference(got, want)
            if difference is not None and not difference <= case.tolerance:
                raise ArithmeticError(
                    f"{case.op}, {name}: results differ from torch's by {difference:.1e} of the largest, "
                    f"more than {case.tolerance:.1e}"
                )
            seconds = _time_on_gpu(function) if device == "cuda" else None
            eager = backend == "reference" or (name.startswith("torch") and name != "torch.compile")
            yield KernelReport(
                op=case.op,
                workload=case.workload,
                implementation=f"{name} ({backend})" if backend else name,
                min_bytes=case.min_bytes,
                counted_bytes=count_bytes(function) if eager else None,
                flops=case.flops,
                peak_bytes=_peak_bytes(function, device),
                milliseconds=None if seconds is None else 1e3 * seconds,
                roofline_fraction=roofline.seconds(case.min_bytes, case.flops) / seconds
                if roofline and seconds
                else None,
                largest_difference=difference,
            )


def _runs(case: Case, device: str) -> Iterator[tuple[str, str | None, Callable[[], Results]]]:
    """Yield name, backend of megarl's ops, and function."""
    triton = uses_triton(torch.empty(0, device=device))
    for name, function in case.implementations.items():
        if name.startswith("megarl"):
            if triton:
                yield name, "triton", function
            yield name, "reference", function
        else:
            yield name, None, function


@contextmanager
def _kernels(backend: str | None) -> Iterator[None]:
    """Make megarl's ops run their references, if that is the backend."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "torch" if backend == "reference" else "auto"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})


def _difference(got: Sequence[Tensor], want: Sequence[Tensor]) -> float | None:
    if len(got) != len(want):
        return None
    pairs = [(a.detach().double(), b.double()) for a, b in zip(got, want, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _time_on_gpu(function: Callable[[], Results]) -> float:
    """Return the median time in seconds, without the first three runs unless they take longer than a second."""
    times: list[float] = []
    while len(times) < 3 + TIMED_RUNS and sum(times) < TIMED_SECONDS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(1e-3 * float(start.elapsed_time(end)))
    return median(times[3:] or times)


def _peak_bytes(function: Callable[[], object], device: str) -> int:
    def run() -> None:
        function()

    if device == "cpu":
        return peak_allocated_bytes(run)
    torch.cuda.reset_peak_memory_stats()
    before = int(torch.cuda.memory_allocated())
    run()
    return int(torch.cuda.max_memory_allocated()) - before


def peak_allocated_bytes(function: Callable[[], None]) -> int:
    """Return the largest sum in bytes of what `function` has allocated and not yet freed on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def count_bytes(function: Callable[[], object]) -> int:
    """Return the bytes of all tensors that PyTorch operations read and write; views and allocations count nothing."""
    counter = _ByteCounter()
    with counter:
        function()
    return counter.bytes


class _ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        schema = function._schema
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
        if not is_view and "empty" not in schema.name and schema.name != "aten::detach":
            read = [x for x in tree_leaves((arguments, keywords)) if isinstance(x, Tensor)]
            written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            written += [] if written else [x for x in tree_leaves(arguments[:1]) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, *written))
        return result
