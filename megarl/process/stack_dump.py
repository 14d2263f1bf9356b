"""Where the processes of this machine are in their code: read from outside, since one that hangs answers no call.

py-spy reads a process's memory, also of one that is stopped. For that it has to be root or the process's own user, and
where ptrace is restricted (`kernel.yama.ptrace_scope` 1 or more, some containers), root or CAP_SYS_PTRACE. Else the
process is asked with SIGUSR2 to write its own account, which one that is stopped does not do, and which SGLang's
schedulers have made no arrangement for: those stay unread.
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
"""Asks for an account; SIGUSR1 asks for an early end."""

FILE = "megarl-stacks"

AT_ONCE = 8
"""Processes that are read side by side."""

ONE_PROCESS_SECONDS = 10.0
ATTEMPTS = 3
"""A process that runs may change what is read of it meanwhile."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Where a process is to be found."""

    node_id: str
    """Ray's."""
    host: str
    pid: int
    account: int
    """File descriptor, in the process, of what it writes when it gets SIGNAL."""


@cache
def give_account() -> int:
    """Have this process write its threads' stacks when it gets SIGNAL, to the file descriptor that is returned."""
    file = os.memfd_create(FILE)  # nothing on disk, and gone with the process
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Of some processes."""

    brief: tuple[str, ...]
    """A line for each: what it is doing on its main thread. The one that differs is the one that others wait for."""
    text: str
    """All threads, also of the processes below."""


def read_stacks(places: Mapping[str, ProcessPlace], seconds: float) -> Stacks:
    """The stacks of these processes of this machine, by name, and of those below them.

    Args:
        seconds: after so many, those that have not been read are left out, and named.
    """
    ends = time.monotonic() + seconds
    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(lambda name: _family(name, places[name], ends), places))
    return Stacks(
        brief=tuple(line for each in found for line in each.brief), text="\n".join(each.text for each in found)
    )


def _family(name: str, place: ProcessPlace, ends: float) -> Stacks:
    """A process, in brief, and those below it."""
    if not _is_alive(place):
        gone = f"{name} (pid {place.pid} on {place.host}) is gone"
        return Stacks(brief=(gone,), text=f"== {gone} ==\n")
    own = _section(name, place, place.pid, ends, place.account)
    try:
        children = psutil.Process(place.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    below = [_section(f"{name}, below it", place, child.pid, ends, None) for child in children]
    return Stacks(brief=own.brief, text="\n".join([own.text, *(each.text for each in below)]))


def _is_alive(place: ProcessPlace) -> bool:
    """Whether it is there, and no other process that has its pid by now."""
    try:
        return os.readlink(f"/proc/{place.pid}/fd/{place.account}").startswith(f"/memfd:{FILE}")
    except FileNotFoundError:
        return False
    except PermissionError:  # nothing can be told, and nothing will be read
        return True


def _section(name: str, place: ProcessPlace, pid: int, ends: float, account: int | None) -> Stacks:
    where = f"{name} (pid {pid} on {place.host}"
    try:
        process = psutil.Process(pid)
        state, title = process.status(), " ".join(process.cmdline()).strip()[:200] or process.name()
    except psutil.NoSuchProcess:
        return Stacks(brief=(f"{where}) is gone",), text=f"== {where}) is gone ==\n")
    left = min(ONE_PROCESS_SECONDS, ends - time.monotonic())
    if left <= 0:
        place_in_code, found = "not read", "not read: out of time\n"
    else:
        place_in_code, found = _found(pid, account, left)
    return Stacks(brief=(f"{where}): {state}, {place_in_code}",), text=f"== {where}, {state}): {title} ==\n{found}")


def _found(pid: int, account: int | None, seconds: float) -> tuple[str, str]:
    """What its main thread is in, and its stacks."""
    text, problem = _spied(pid, seconds)
    if text is not None:
        return f"in {_innermost(text)}", text
    if account is None:
        return "not read", f"not read: {problem}\n"
    own = _own_account(pid, account, seconds)
    if own is None:
        return "not read", f"not read: {problem}; and it does not answer {SIGNAL.name}\n"
    return "see below", f"{problem}; its own account:\n{own}"


def _innermost(text: str) -> str:
    """Of py-spy's main thread, the function."""
    _, _, main = text.partition('"MainThread"')
    return main.splitlines()[1].strip() if main.count("\n") > 1 else "no Python"


def _spied(pid: int, seconds: float) -> tuple[str | None, str]:
    """What py-spy says of it; or None, and why."""
    program = which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if program is None:
        return None, "py-spy is not installed"
    problem = ""
    for _ in range(ATTEMPTS):
        # without --nonblocking it stops the process, and fails on one that is stopped already
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603 -- a program of this installation
        except subprocess.TimeoutExpired:
            return None, f"py-spy took longer than {seconds:.0f} s"
        if done.returncode == 0:
            return "\n".join(done.stdout.splitlines()[2:]).strip() + "\n", ""  # the first two name the process
        problem = f"py-spy: {(done.stderr.strip() or 'no reason given').splitlines()[0]}"
    return None, problem


def _own_account(pid: int, account: int, seconds: float) -> str | None:
    """What the process writes when it is asked, if it does."""
    ends = time.monotonic() + min(seconds, 2.0)
    try:
        if not _catches(pid):
            return None
        with Path(f"/proc/{pid}/fd/{account}").open("rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            text = b""
            while time.monotonic() < ends:
                time.sleep(POLL_SECONDS)
                more = file.read()
                if text and not more:
                    return text.decode(errors="replace")
                text += more
            return text.decode(errors="replace") or None
    except OSError:
        return None


def _catches(pid: int) -> bool:
    """Whether SIGNAL would not kill it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
