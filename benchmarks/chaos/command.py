"""A `megarl` command in a session of its own, every process of its run, and what they leave behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.chaos.targets import ENGINE_VARIABLE, ProcessRow

MARKER = "MEGARL_CHAOS_RUN"
"""An environment variable that every process of a run inherits."""

RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Where Ray's cluster is killed, these two report it for 60 seconds to a service that has died with it."""

END_SECONDS, AGENTS_END_SECONDS = 15.0, 70.0
"""After which a process of an ended run, or one of `RAY_AGENTS`, is an orphan."""

SHARED_MEMORY = Path("/dev/shm")


class Command:
    """Started, ended and started again, it is the same run."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """`log`: takes what the command prints."""
        self._arguments, self._log, self._mark = arguments, log, uuid.uuid4().hex
        # not beside the log: the names of Ray's sockets begin with it, and may not be long
        self.temporary = Path(tempfile.mkdtemp(prefix="m"))
        self._seen: set[psutil.Process] = set()
        self._others: set[psutil.Process] = set()
        """Processes of others stay that."""
        self._drivers: set[int] = set()
        self._shared_before = set(SHARED_MEMORY.iterdir())
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0

    @property
    def driver(self) -> int:
        """Process id of the command as it was started last."""
        assert self._process is not None, "the command has not been started"
        return self._process.pid

    def start(self, *more: str) -> None:
        """Run it, with `more` arguments behind its own."""
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment |= {MARKER: self._mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        command = [str(Path(sys.executable).with_name("megarl")), *self._arguments, *more]
        with self._log.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._drivers.add(self._process.pid)

    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def last_words(self, lines: int = 20) -> str:
        """The end of what it has printed since it was started last."""
        printed = self._log.read_bytes()[self._log_begin :].decode(errors="replace")
        return "\n".join(printed.splitlines()[-lines:])

    def living(self) -> list[psutil.Process]:
        """Processes of the run that have not ended: of its sessions, its descendants, and those with its mark."""
        for process in set(psutil.process_iter()) - self._seen - self._others:
            (self._seen if self._is_ours(process) else self._others).add(process)
        return [p for p in self._seen if not _has_ended(p)]

    def table(self) -> list[ProcessRow]:
        """As `living`, by what they call themselves."""
        rows = (_row(process) for process in self.living())
        return [row for row in rows if row is not None]

    def kill(self, pid: int) -> None:
        """SIGKILL to a process of the run, if it still is that process."""
        for process in self._seen:
            if process.pid == pid and not _has_ended(process):
                process.kill()

    def end(self) -> None:
        """Kill whatever is left of the run."""
        for process in self.living():
            process.kill()
        if self._process is not None:
            self._process.wait(10)

    def orphans(self) -> list[str]:
        """What outlives the ended run by more than it may: processes, and shared memory that none has mapped."""
        _wait_until(lambda: all(title_of(p) in RAY_AGENTS for p in self.living()), END_SECONDS)
        left = [p for p in self.living() if title_of(p) not in RAY_AGENTS]
        _wait_until(lambda: not set(self.living()) - set(left), AGENTS_END_SECONDS - END_SECONDS)
        left += [p for p in self.living() if p not in left]
        return [f"process {p.pid} {title_of(p)}" for p in left] + self._unmapped()

    def _unmapped(self) -> list[str]:
        new = {str(path) for path in set(SHARED_MEMORY.iterdir()) - self._shared_before}
        mapped = "\n".join(_maps(p) for p in psutil.process_iter()) if new else ""
        return sorted(path for path in new if path not in mapped)

    def forget(self) -> None:
        """Remove its temporary files, Ray's logs among them."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if os.getsid(process.pid) in self._drivers:
                return True
            known = {*self._drivers, *(p.pid for p in self._seen if p.is_running())}
            # a process that renames itself, as some of Ray's do, may have overwritten the mark
            return bool(known & {p.pid for p in process.parents()}) or process.environ().get(MARKER) == self._mark
        except (psutil.Error, OSError):
            return False


def title_of(process: psutil.Process) -> str:
    """What a process calls itself; nothing where it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def _row(process: psutil.Process) -> ProcessRow | None:
    try:
        return ProcessRow(
            pid=process.pid,
            parent=process.ppid(),
            title=title_of(process),
            has_engine_variable=ENGINE_VARIABLE in process.environ(),
        )
    except psutil.Error:
        return None


def _has_ended(process: psutil.Process) -> bool:
    """True also for zombies: where nobody reaps orphans, they stay."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
