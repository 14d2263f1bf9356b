"""Many small programs, each in a new sandbox."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.sandbox.guest.channel import Limits
from megarl.sandbox.session import ForkServer

SOURCE = "import collections\ndef f(x):\n    return collections.Counter(x).most_common(1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of programs in one kind of sandbox, in milliseconds."""

    tier: str
    runs: int
    wall_p50_ms: float
    wall_p95_ms: float
    cpu_p50_ms: float
    cpu_p95_ms: float
    processes_left: int
    mounts_left: int
    files_left: int


def measure(tier: str, runs: int) -> Measurement:
    """Return the times of `runs` programs, one after the other, from the start of a sandbox to its end.

    CPU time is that of all processes of the sandbox and of its supervisor.
    """
    server, limits = ForkServer(), Limits()
    server.start(tier, limits).close()
    before = _processes(), _mounts(), _files()
    wall, cpu = [], []
    for _ in range(runs):
        start = time.perf_counter()
        session = server.start(tier, limits)
        case = {"source": SOURCE, "setup": "", "call": "f('abca')"}
        session.send({"kind": "case", "wall_seconds": limits.wall_seconds}, case, seconds=10)
        reply = session.receive(seconds=60)
        session.close()
        wall.append(1000 * (time.perf_counter() - start))
        cpu.append(1000 * session.cpu_seconds)
        if reply["value"] != "[('a', 2)]":
            raise AssertionError(reply)
    time.sleep(0.5)  # the last supervisor exits after it has reported
    after = _processes(), _mounts(), _files()
    server.close()
    processes, mounts, files = (len(new - old) for new, old in zip(after, before, strict=True))
    return Measurement(
        tier=tier,
        runs=runs,
        wall_p50_ms=round(float(np.percentile(wall, 50)), 1),
        wall_p95_ms=round(float(np.percentile(wall, 95)), 1),
        cpu_p50_ms=round(float(np.percentile(cpu, 50)), 1),
        cpu_p95_ms=round(float(np.percentile(cpu, 95)), 1),
        processes_left=processes,
        mounts_left=mounts,
        files_left=files,
    )


def _processes() -> set[str]:
    """Return the processes of this machine whose command line names a sandbox."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            if b"megarl.sandbox" in command or b"megarl-runsc-" in command:
                found.add(name)
    return found


def _mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


def _files() -> set[str]:
    """Return the control groups and files of sandboxes."""
    folders = [*Path("/sys/fs/cgroup").glob("**/megarl-sandbox-*"), *Path("/tmp").glob("megarl-runsc-*")]
    return set(map(str, folders))
