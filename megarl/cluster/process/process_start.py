"""The start of this process: faster imports, imports that let other processes start first, and a trace of it all.

Times are Unix times, so that processes can be compared; across nodes as precisely as their clocks agree.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def freeze_objects(*, collect: bool = False) -> None:
    """Leave all objects that exist now out of later garbage collections.

    Imported modules have some 300,000 objects, none of them garbage. A full collection that visits them stops a process
    for 0.1 to 0.2 s, a trainer rank and with it all ranks that wait for it.

    Args:
        collect: collect garbage first, because what is garbage now will never be freed. Takes as long as such a stop.
    """
    if collect:
        gc.collect()
    gc.freeze()


CONTROLLER_THRESHOLDS = (50_000, 5, 2)
"""Garbage collection thresholds of a controller. By default a collection follows 700 new objects."""


def collect_rarely() -> None:
    """Freeze all objects that exist now, and collect garbage less often from now on.

    A step of 16,384 trajectories makes some 300,000 objects, few of which are in cycles and nearly all of which live
    until its end. By default, 440 collections of it find nothing. Not for processes whose garbage may hold memory of a
    device.
    """
    freeze_objects(collect=True)
    gc.set_threshold(*CONTROLLER_THRESHOLDS)


LOW_PRIORITY = 10
"""Niceness of a thread that imports modules at low priority."""


@contextmanager
def fast_imports(*first: str) -> Iterator[None]:
    """Import `first` at low priority, then torch, and let the block import without what only slows imports.

    There are no garbage collections, which find nothing among new modules, and `torch.compile` waits for the first call
    of the function that it compiles: by itself it imports TorchDynamo and TorchInductor where a function is defined,
    about 1.4 CPU seconds.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        if first:
            import_at_low_priority(*first)
        import torch

        compile_now = torch.compile
        torch.compile = functools.partial(compile_on_first_call, compile_now)
        try:
            yield
        finally:
            torch.compile = compile_now
    finally:
        if collects:
            gc.enable()


def compile_on_first_call(compile_now: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    """Return a function that compiles `model` when it is first called; modules and classes are compiled at once.

    Args:
        compile_now: torch.compile.
        model: as for torch.compile; None: return a decorator.
        options: as for torch.compile.
    """
    if model is None:
        return functools.partial(compile_on_first_call, compile_now, **options)
    if not hasattr(model, "__code__"):
        return compile_now(model, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile_now(model, **options)  # type: ignore[no-any-return]

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def run_adam_without_compiler() -> None:
    """Let torch's Adam and AdamW run without TorchDynamo, which takes 1.3 CPU seconds to import.

    For processes that compile nothing: torch calls TorchDynamo there to leave the optimizer out of compiled graphs.
    """
    import torch
    from torch.optim import Adam, Optimizer

    # decorated with torch._disable_dynamo, which looks here for the function to call
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(Optimizer, name).__wrapped__
        setattr(method, "__dynamo_disable", method)
    if hasattr(Adam.step, "hooked"):  # an optimizer exists, so that TorchDynamo has been imported
        return
    step = Adam.step.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(step)
    def step_with_grad_mode(self: Adam, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    Adam.step = step_with_grad_mode  # type: ignore[method-assign]


def import_at_low_priority(*modules: str) -> None:
    """Import modules in a thread of low CPU priority, and return once that is done.

    Processes that start at the same time share the cores. This one then leaves them to those that it will wait for. A
    thread of its own, because only root may raise a priority again.

    Raises:
        ImportError: a module cannot be imported.
    """
    with ThreadPoolExecutor(1, "megarl-imports", initializer=_lower_priority) as thread:
        for module in modules:
            thread.submit(importlib.import_module, module).result()


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)


STARTED_VARIABLE = "MEGARL_STARTED"
"""Environment variable set by a launcher or batch script: the Unix time at which it started."""

Interval = tuple[float, float]
"""Begin and end, Unix times in seconds."""

_imports: list[Interval] = []  # module state, because imports are per process too


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTiming:
    """Timing of a process's startup so far."""

    ready_at: float
    """Unix time at which the process could take calls."""
    imports: tuple[Interval, ...]
    builds: tuple[Interval, ...]


class StartupTrace:
    """Records the startup of a process, which is ready when this is created and builds one worker at a time."""

    def __init__(self) -> None:
        self._ready_at = self._idle_since = time.time()
        self._builds: list[Interval] = []

    def record_call(self, requested_at: float) -> None:
        """Record the arrival of a call made at `requested_at`: until now its modules were imported."""
        _imports.append((max(requested_at, self._idle_since), time.time()))

    @contextmanager
    def record_build(self, requested_at: float) -> Iterator[None]:
        """Record the arrival of a call, as `record_call`, and the block as a build."""
        self.record_call(requested_at)
        began = time.time()
        yield
        self._idle_since = time.time()
        self._builds.append((began, self._idle_since))

    def snapshot(self) -> StartupTiming:
        """Return the timing recorded so far."""
        return StartupTiming(ready_at=self._ready_at, imports=tuple(_imports), builds=tuple(self._builds))


def process_creation_time() -> float:
    """Return the Unix time at which this process was created, to 0.01 s.

    psutil is less precise: it adds the boot time, which is in full seconds.
    """
    stat = Path("/proc/self/stat").read_text()
    ticks_after_boot = int(stat.rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_after_boot / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@contextmanager
def record_imports(*first: str) -> Iterator[None]:
    """Record the block as imports and make them faster, see `fast_imports`; for imports that take seconds."""
    began = time.time()
    with fast_imports(*first):
        yield
    _imports.append((began, time.time()))
