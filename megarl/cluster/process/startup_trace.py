"""Startup trace of this process: when it was ready, when it imported modules, when it built its workers.

Times are Unix times, so that processes can be compared; across nodes as precisely as their clocks agree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.process.fast_imports import fast_imports

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
