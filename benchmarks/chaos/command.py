"""Runs a `megarl` command in its own session; finds every process of the run, and what outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from benchmarks.chaos.targets import ENGINE_VARIABLE, ProcessRow
from megarl.cluster.process.child_processes import set_parent_death_signal

MARKER = "MEGARL_CHAOS_RUN"
"""An environment variable that every process of a run inherits."""

RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""After a Ray cluster has been killed, these two retry for 60 seconds to report it to a service that is gone too."""

END_SECONDS, AGENTS_END_SECONDS = 15.0, 70.0
"""Time after the end of a run from which its processes, or those named in `RAY_AGENTS`, count as orphans."""

SHARED_MEMORY = Path("/dev/shm")


class Command:
    """One run, across all restarts of its command."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """`log`: file to which the output of the command is appended."""
        self._arguments, self._log, self._mark = arguments, log, uuid.uuid4().hex
        # not in the folder of the log: Ray's socket paths begin with it, and their length is limited
        self.temporary = Path(tempfile.mkdtemp(prefix="m"))
        self._seen: set[psutil.Process] = set()
        self._others: set[psutil.Process] = set()
        """Processes known not to belong to the run; they are not examined again."""
        self._drivers: set[int] = set()
        self._shared_before = set(SHARED_MEMORY.iterdir())
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0

    @property
    def driver(self) -> int:
        """Process id of the last start of the command."""
        assert self._process is not None, "the command has not been started"
        return self._process.pid

    def start(self, *more: str) -> None:
        """Start the command with `more` arguments appended."""
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment |= {MARKER: self._mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        command = [str(Path(sys.executable).with_name("megarl")), *self._arguments, *more]
        with self._log.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=partial(set_parent_death_signal, signal.SIGKILL, parent=os.getpid()),
            )
        self._drivers.add(self._process.pid)

    def exit_code(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return None if self._process is None else self._process.poll()

    def wait(self) -> int:
        """Wait for the command and return its exit code."""
        assert self._process is not None, "the command has not been started"
        return self._process.wait()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines printed since the last start."""
        printed = self._log.read_bytes()[self._log_begin :].decode(errors="replace")
        return "\n".join(printed.splitlines()[-lines:])

    def find_live_processes(self) -> list[psutil.Process]:
        """Return the live processes of the run: those in its sessions, their descendants, and those with its mark."""
        for process in set(psutil.process_iter()) - self._seen - self._others:
            (self._seen if self._is_ours(process) else self._others).add(process)
        return [p for p in self._seen if not _has_ended(p)]

    def table(self) -> list[ProcessRow]:
        """Return the process table of the run's live processes."""
        rows = (_row(process) for process in self.find_live_processes())
        return [row for row in rows if row is not None]

    def kill(self, pid: int) -> None:
        """Send SIGKILL to a process of the run; no-op if the pid has been reused."""
        for process in self._seen:
            if process.pid == pid and not _has_ended(process):
                process.kill()

    def end(self) -> None:
        """Kill all remaining processes of the run."""
        for process in self.find_live_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait(10)

    def orphans(self) -> list[str]:
        """Return processes that outlive the run by more than the allowed time, and unmapped files in shared memory."""
        _wait_until(lambda: all(process_title(p) in RAY_AGENTS for p in self.find_live_processes()), END_SECONDS)
        left = [p for p in self.find_live_processes() if process_title(p) not in RAY_AGENTS]
        _wait_until(lambda: not set(self.find_live_processes()) - set(left), AGENTS_END_SECONDS - END_SECONDS)
        left += [p for p in self.find_live_processes() if p not in left]
        return [f"process {p.pid} {process_title(p)}" for p in left] + self._unmapped()

    def _unmapped(self) -> list[str]:
        new = {str(path) for path in set(SHARED_MEMORY.iterdir()) - self._shared_before}
        mapped = "\n".join(_maps(p) for p in psutil.process_iter()) if new else ""
        return sorted(path for path in new if path not in mapped)

    def remove_temporary(self) -> None:
        """Remove temporary files, including Ray's logs."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if os.getsid(process.pid) in self._drivers:
                return True
            known = {*self._drivers, *(p.pid for p in self._seen if p.is_running())}
            # a process that renames itself, as some Ray processes do, may have overwritten its environment
            return bool(known & {p.pid for p in process.parents()}) or process.environ().get(MARKER) == self._mark
        except (psutil.Error, OSError):
            return False


def process_title(process: psutil.Process) -> str:
    """Return the title that the process has set, or its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def _row(process: psutil.Process) -> ProcessRow | None:
    try:
        return ProcessRow(
            pid=process.pid,
            parent=process.ppid(),
            title=process_title(process),
            has_engine_variable=ENGINE_VARIABLE in process.environ(),
        )
    except psutil.Error:
        return None


def _has_ended(process: psutil.Process) -> bool:
    """Return whether the process has ended; true also for zombies, which remain where nothing reaps orphans."""
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
