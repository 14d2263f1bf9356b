"""How this process came up: when it was there, when it imported modules, when it built what it was made for.

In Unix time, so that processes compare; those of several machines as well as their clocks agree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STARTED = "MEGARL_STARTED"
"""Environment variable of a launcher or a batch script: the Unix time at which it began."""

Interval = tuple[float, float]
"""Begin and end."""

_imports: list[Interval] = []  # of the process, as what it has imported is


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStart:
    """What came of it so far."""

    there: float
    """When the process could be told what to do."""
    imports: tuple[Interval, ...]
    builds: tuple[Interval, ...]


class Diary:
    """Of a process that is there now and that builds things, one after the other."""

    def __init__(self) -> None:
        self._there = self._free_since = time.time()
        self._builds: list[Interval] = []

    def called(self, asked: float) -> None:
        """A call has arrived, which was made at `asked`: what it brings had to be imported since."""
        _imports.append((max(asked, self._free_since), time.time()))

    @contextmanager
    def building(self, asked: float) -> Iterator[None]:
        """As `called`; and the block builds."""
        self.called(asked)
        begun = time.time()
        yield
        self._free_since = time.time()
        self._builds.append((begun, self._free_since))

    def read(self) -> ProcessStart:
        """What is in it."""
        return ProcessStart(there=self._there, imports=tuple(_imports), builds=tuple(self._builds))


def process_created() -> float:
    """When this process was, to the hundredth of a second; psutil would add the time of boot in whole seconds."""
    stat = Path("/proc/self/stat").read_text()
    ticks_after_boot = int(stat.rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_after_boot / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@contextmanager
def importing() -> Iterator[None]:
    """The block imports what takes seconds."""
    begun = time.time()
    yield
    _imports.append((begun, time.time()))
