"""A `megarl` command in a process of its own, every process that descends from it, and what they leave behind."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MARKER = "MEGARL_TEST_RUN"
"""An environment variable that every process of a run inherits."""

RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Where Ray's cluster is killed, these two report it for 60 seconds to a service that has died with it."""


class Launched:
    """Runs the command in a session and a temporary folder of its own; its output goes to files, not to pipes."""

    def __init__(
        self, folder: Path, *arguments: str | Path, program: str = "megarl", keeps_ray_address: bool = False
    ) -> None:
        self._folder, self._mark = folder, uuid.uuid4().hex
        # not in `folder`: the names of Ray's sockets begin with it, and may not be long
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
                # a shell's background jobs ignore Ctrl-C, and so would their children
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def steps_done(self) -> int:
        """The last step in metrics.jsonl."""
        file = self._folder / "run" / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        """Block until the run has finished `step`, and learn its processes."""
        self.wait_until(lambda: self.steps_done() >= step, seconds)

    def wait_until(self, condition: Callable[[], Any], seconds: float) -> None:
        """Block until the condition holds, and learn the run's processes; the run must go on until then."""
        arrived = wait_until(lambda: self.process.poll() is not None or condition(), seconds)
        assert self.process.poll() is None, f"the run has ended:\n{self.stdout}{self.stderr}"
        assert arrived, f"not within {seconds} s:\n{self.stdout}{self.stderr}"
        self.living()

    def living(self) -> list[psutil.Process]:
        """Processes of the run that have not ended: of its session, its descendants, and those with its mark."""
        for process in psutil.process_iter():
            if process not in self._seen and self._is_ours(process):
                self._seen.add(process)
        return [p for p in self._seen if not ended(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if os.getsid(process.pid) == self.process.pid:
                return True
            known = {self.process.pid, *(p.pid for p in self._seen if p.is_running())}
            if known & {process.pid, *(p.pid for p in process.parents())}:
                return True
            # a process that renames itself, as some of Ray's do, may have overwritten this
            return process.environ().get(MARKER) == self._mark
        except (psutil.Error, OSError):
            return False

    def named(self, name: str) -> psutil.Process:
        """The one living process of that name."""
        (process,) = (p for p in self.living() if p.name() == name)
        return process

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Signal the driver, or all of its process group as a terminal does."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self, seconds: float) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def assert_nothing_lives(self, seconds: float, *, but: frozenset[str] | set[str] = frozenset()) -> None:
        """Every process of the run has ended within `seconds`, save those of the names `but`."""

        def rest() -> list[psutil.Process]:
            return [p for p in self.living() if name_of(p) not in but]

        assert wait_until(lambda: not rest(), seconds), rest()

    def leftovers(self) -> list[str]:
        """Temporary files save Ray's logs, and new files in shared memory that no process has mapped any more."""
        new = {str(path) for path in set(SHARED_MEMORY.iterdir()) - self._shared_before}
        mapped = "\n".join(_maps(p) for p in psutil.process_iter()) if new else ""
        here = [str(path) for path in self.temporary.iterdir() if path.name != "ray"]
        return here + [path for path in new if path not in mapped]

    def end(self) -> None:
        """Kill whatever is left of the run."""
        for process in self.living():
            process.kill()
        self.process.wait(10)
        shutil.rmtree(self.temporary, ignore_errors=True)


SHARED_MEMORY = Path("/dev/shm")


def list_steps(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run's folder, one row a step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""


def name_of(process: psutil.Process) -> str:
    """The name that a process gives itself, in full."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def ended(process: psutil.Process) -> bool:
    """True also for zombies: where nobody reaps orphans, they stay."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
