"""Runs a `megarl` command as a subprocess; finds every process of the run, and what outlives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.time_limits import END_SECONDS, HANG_SECONDS

MARKER = "MEGARL_TEST_RUN"
"""An environment variable that every process of a run inherits."""

RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""After a Ray cluster has been killed, these two retry for 60 seconds to report it to a service that is gone too."""


class LaunchedCommand:
    """A command that runs in its own session and temporary folder, with its output in files."""

    def __init__(
        self, folder: Path, *arguments: str | Path, program: str = "megarl", keeps_ray_address: bool = False
    ) -> None:
        self._folder, self._mark = folder, uuid.uuid4().hex
        # not in `folder`: Ray's socket paths begin with it, and their length is limited
        self.temporary = Path(tempfile.mkdtemp(prefix="m"))
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS" or keeps_ray_address}
        environment |= {MARKER: self._mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        command = [Path(sys.executable).with_name(program), *arguments]
        self._seen: set[psutil.Process] = set()
        self._shared_before = set(SHARED_MEMORY.iterdir())
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                # background jobs of a shell ignore SIGINT, and their children inherit that
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def steps_done(self) -> int:
        """Return the last step in metrics.jsonl."""
        file = self._folder / "run" / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has finished `step`, and record its processes."""
        self.wait_until(lambda: self.steps_done() >= step)

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait until the condition holds, and record the run's processes; fail if the run ends before."""
        arrived = wait_until(lambda: self.process.poll() is not None or condition())
        assert self.process.poll() is None, f"the run ended early:\n{self.stdout}{self.stderr}"
        assert arrived, f"not within {HANG_SECONDS:g} s:\n{self.stdout}{self.stderr}"
        self.find_live_processes()

    def find_live_processes(self) -> list[psutil.Process]:
        """Return the live processes of the run: those in its session, their descendants, and those with its mark."""
        for process in psutil.process_iter():
            if process not in self._seen and self._is_ours(process):
                self._seen.add(process)
        return [p for p in self._seen if not has_ended(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if os.getsid(process.pid) == self.process.pid:
                return True
            known = {self.process.pid, *(p.pid for p in self._seen if p.is_running())}
            if known & {process.pid, *(p.pid for p in process.parents())}:
                return True
            # a process that renames itself, as some Ray processes do, may have overwritten its environment
            return process.environ().get(MARKER) == self._mark
        except (psutil.Error, OSError):
            return False

    def named(self, name: str) -> psutil.Process:
        """Return the only live process of that name."""
        (process,) = (p for p in self.find_live_processes() if p.name() == name)
        return process

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the driver, or to its process group as a terminal does."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self) -> int:
        """Wait for the command and return its exit code."""
        return self.process.wait(HANG_SECONDS)

    def assert_no_processes_left(
        self, seconds: float = END_SECONDS, *, but: frozenset[str] | set[str] = frozenset()
    ) -> None:
        """Check that every process of the run ends within `seconds`, except those with titles in `but`."""

        def rest() -> list[psutil.Process]:
            return [p for p in self.find_live_processes() if process_title(p) not in but]

        assert wait_until(lambda: not rest(), seconds), rest()

    def find_leftovers(self, seconds: float = END_SECONDS) -> list[str]:
        """Return temporary files other than Ray's logs, and new files in shared memory that no process has mapped.

        Those that are gone within `seconds` do not count: another test may have been about to map or to remove them.
        """
        wait_until(lambda: not self._leftovers(), seconds)
        return self._leftovers()

    def _leftovers(self) -> list[str]:
        new = {str(path) for path in set(SHARED_MEMORY.iterdir()) - self._shared_before}
        mapped = "\n".join(_maps(p) for p in psutil.process_iter()) if new else ""
        here = [str(path) for path in self.temporary.iterdir() if path.name != "ray"]
        return here + [path for path in new if path not in mapped]

    def end(self) -> None:
        """Kill all remaining processes of the run and remove its temporary files."""
        for process in self.find_live_processes():
            process.kill()
        self.process.wait(HANG_SECONDS)
        shutil.rmtree(self.temporary, ignore_errors=True)


SHARED_MEMORY = Path("/dev/shm")


def gained(values: Sequence[float]) -> float:
    """Return the mean of the last 5 values minus the mean of the first 5."""
    return sum(values[-5:]) / 5 - sum(values[:5]) / 5


def list_steps(run: Path) -> list[dict[str, Any]]:
    """Return the metrics in a run folder, one row per step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""


def process_title(process: psutil.Process) -> str:
    """Return the title that the process has set, or its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def has_ended(process: psutil.Process) -> bool:
    """Return whether the process has ended; true also for zombies, which remain where nothing reaps orphans."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], Any], seconds: float = HANG_SECONDS) -> bool:
    """Poll until the condition is true; return False on timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
