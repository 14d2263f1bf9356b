"""Stacks of processes on this node, read from outside because a hung process answers no calls.

py-spy reads the memory of a process, even if it is stopped. It must run as root or as the user of the process; where
ptrace is restricted (`kernel.yama.ptrace_scope` 1 or more, some containers) it needs root or CAP_SYS_PTRACE. If py-spy
fails, SIGUSR2 makes the process dump its own stacks. Stopped processes cannot do that, and SGLang's schedulers do not
handle the signal: their stacks are not read.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import which

import psutil

SIGNAL = signal.SIGUSR2
"""Requests a stack dump; SIGUSR1 is the early-stop signal."""

MEMFD_NAME = "megarl-stacks"
"""Name of the memory file that a process dumps its stacks to."""

MAX_PARALLEL_READS = 8
"""Number of processes that are read concurrently."""

PER_PROCESS_SECONDS = 10.0
MAX_ATTEMPTS = 3
"""Attempts of py-spy, which fails if a running process changes the memory that it reads."""
OWN_DUMP_SECONDS = 2.0
"""Time in which a process dumps its own stacks."""

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Identifies a process of the run and the file of its stack dumps."""

    node_id: str
    """Ray's id of the node."""
    host: str
    pid: int
    dump_fd: int
    """File descriptor, in that process, of the file that it dumps its stacks to on SIGNAL."""


@cache
def register_stack_dump() -> int:
    """Make this process dump the stacks of its threads on SIGNAL; return the file descriptor it writes to."""
    file = os.memfd_create(MEMFD_NAME)  # in memory only, released when the process ends
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of one or more processes, as text."""

    summary_lines: tuple[str, ...]
    """One line per process: its state and the innermost frame of its main thread.

    A process that differs from the others is usually the one they wait for.
    """
    text: str
    """Stacks of all threads of the processes and of their descendants."""


def read_stacks(processes: Mapping[str, ProcessInfo], seconds: float) -> Stacks:
    """Read the stacks of processes on this node and of their descendants.

    Args:
        processes: the processes by the names to show.
        seconds: time limit; processes that have not been read by then are listed without stacks.
    """
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(MAX_PARALLEL_READS) as threads:
        found = list(threads.map(lambda name: _read_process_tree(name, processes[name], deadline), processes))
    return Stacks(
        summary_lines=tuple(line for each in found for line in each.summary_lines),
        text="\n".join(each.text for each in found),
    )


def _read_process_tree(name: str, info: ProcessInfo, deadline: float) -> Stacks:
    """Read a process, with its summary line, and its descendants."""
    if not _is_alive(info):
        gone = f"{name} (pid {info.pid} on {info.host}) has ended"
        return Stacks(summary_lines=(gone,), text=f"== {gone} ==\n")
    own = _describe_process(name, info, info.pid, deadline, info.dump_fd)
    try:
        children = psutil.Process(info.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    below = [_describe_process(f"{name}, descendant", info, child.pid, deadline, None) for child in children]
    return Stacks(summary_lines=own.summary_lines, text="\n".join([own.text, *(each.text for each in below)]))


def _is_alive(info: ProcessInfo) -> bool:
    """Return whether the process still exists and its pid has not been reused."""
    try:
        return os.readlink(f"/proc/{info.pid}/fd/{info.dump_fd}").startswith(f"/memfd:{MEMFD_NAME}")
    except FileNotFoundError:
        return False
    except PermissionError:  # cannot tell; reading it will fail too
        return True


def _describe_process(name: str, info: ProcessInfo, pid: int, deadline: float, dump_fd: int | None) -> Stacks:
    where = f"{name} (pid {pid} on {info.host}"
    try:
        process = psutil.Process(pid)
        state, title = process.status(), " ".join(process.cmdline()).strip()[:200] or process.name()
    except psutil.NoSuchProcess:
        return Stacks(summary_lines=(f"{where}) has ended",), text=f"== {where}) has ended ==\n")
    left = min(PER_PROCESS_SECONDS, deadline - time.monotonic())
    if left <= 0:
        location, found = "not read", "not read: out of time\n"
    else:
        location, found = _read_one_process(pid, dump_fd, left)
    return Stacks(summary_lines=(f"{where}): {state}, {location}",), text=f"== {where}, {state}): {title} ==\n{found}")


def _read_one_process(pid: int, dump_fd: int | None, seconds: float) -> tuple[str, str]:
    """Return the location of the main thread and the stacks of all threads."""
    text, problem = run_py_spy(pid, seconds)
    if text is not None:
        return f"in {_innermost_frame(text)}", text
    if dump_fd is None:
        return "not read", f"not read: {problem}\n"
    own = _request_own_dump(pid, dump_fd, seconds)
    if own is None:
        return "not read", f"not read: {problem}; and it does not answer {SIGNAL.name}\n"
    return "see below", f"{problem}; dumped by the process itself:\n{own}"


def _innermost_frame(text: str) -> str:
    """Return the innermost frame of the main thread in py-spy's output `text`."""
    _, _, main = text.partition('"MainThread"')
    return main.splitlines()[1].strip() if main.count("\n") > 1 else "no Python"


def run_py_spy(pid: int, seconds: float) -> tuple[str | None, str]:
    """Return py-spy's dump and an empty string, or None and the reason of the failure."""
    program = which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if program is None:
        return None, "py-spy is not installed"
    problem = ""
    for _ in range(MAX_ATTEMPTS):
        # without --nonblocking, py-spy stops the process, and fails if it is already stopped
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603 -- a program of this installation
        except subprocess.TimeoutExpired:
            return None, f"py-spy took longer than {seconds:.0f} s"
        if done.returncode == 0:
            return "\n".join(done.stdout.splitlines()[2:]).strip() + "\n", ""  # the first two lines name the process
        problem = f"py-spy: {(done.stderr.strip() or 'no reason given').splitlines()[0]}"
    return None, problem


def _request_own_dump(pid: int, dump_fd: int, seconds: float) -> str | None:
    """Send SIGNAL and return what the process dumps; None if it does not."""
    deadline = time.monotonic() + min(seconds, OWN_DUMP_SECONDS)
    try:
        if not _has_handler(pid):
            return None
        with Path(f"/proc/{pid}/fd/{dump_fd}").open("rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            text = b""
            while time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                more = file.read()
                if text and not more:
                    return text.decode(errors="replace")
                text += more
            return text.decode(errors="replace") or None
    except OSError:
        return None


def _has_handler(pid: int) -> bool:
    """Return whether the process handles SIGNAL, which would kill it otherwise."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
