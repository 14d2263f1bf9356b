"""Runs a `megarl` command as a subprocess; finds every process of the run, and what outlives it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from megarl.cluster.process.child_processes import set_parent_death_signal
from tests.time_limits import HANG_SECONDS, wait_until

MARKER = "MEGARL_TEST_RUN"
"""An environment variable that every process of a run inherits."""
MISMATCH = "train_infer_mismatch/logprob_abs_max"
COMPARED_METRICS = ("loss", "grad_norm", "reward/mean", "response/length", "entropy", MISMATCH)
"""Metrics of a step that are the same, bit for bit, however the run is placed."""
RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""After a Ray cluster has been killed, these two retry for 60 seconds to report it to a service that is gone too."""


class LaunchedCommand:
    """A command that runs in its own session and temporary folder, with its output in files."""

    def __init__(self, folder: Path, *arguments: str | Path, program="megarl", keeps_ray_address=False) -> None:
        self._folder, self._mark = folder, uuid.uuid4().hex
        # not in `folder`: Ray's socket paths begin with it, and their length is limited
        self.temporary = Path(tempfile.mkdtemp(prefix="m"))
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS" or keeps_ray_address}
        environment |= {MARKER: self._mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        environment["PYTHONFAULTHANDLER"] = "1"  # for `_describe_hang`
        command = [Path(sys.executable).with_name(program), *arguments]
        self._seen: set[psutil.Process] = set()
        self._mapped: set[Path] = set()
        """Files in shared memory that processes of the run have mapped."""
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                # after SIGKILL, torchrun and Ray would leave their processes
                preexec_fn=_begin_command(signal.SIGKILL if program == "megarl" else signal.SIGTERM),
            )

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def steps_done(self) -> int:
        return last_step(self._folder / "run")

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has finished `step`, and record its processes."""
        self.wait_until(lambda: self.steps_done() >= step)

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait until the condition holds, and record the run's processes; fail if the run ends before."""
        arrived = wait_until(lambda: self.process.poll() is not None or condition())
        assert self.process.poll() is None, f"the run ended early:\n{self.stdout}{self.stderr}"
        assert arrived, f"not within {HANG_SECONDS:g} s:\n{self._describe_hang()}"
        self.find_live_processes()

    def find_live_processes(self) -> list[psutil.Process]:
        """Return the live processes of the run: those in its session, their descendants, and those with its mark."""
        for process in psutil.process_iter():
            if process not in self._seen and self._is_ours(process):
                self._seen.add(process)
        live = [p for p in self._seen if not has_ended(p)]
        self._mapped |= {path for process in live for path in _mapped_shared_memory(process)}
        return live

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

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the driver, or to its process group as a terminal does."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self) -> int:
        """Wait for the command, as long as it writes anything, and return its exit code."""
        while self.process.poll() is None:
            has_changed = partial(self._differs_from, self._num_written())
            assert wait_until(has_changed), f"nothing within {HANG_SECONDS:g} s:\n{self._describe_hang()}"
        return self.process.wait()

    def _describe_hang(self) -> str:
        """Abort the command; return the run's processes, the ends of Ray's logs, and the output with the traceback."""
        lines = [f"{process_title(p)} ({p.pid})" for p in self.find_live_processes()]
        self.send(signal.SIGABRT)
        self.process.wait(HANG_SECONDS)
        for log in sorted(self.temporary.glob("ray/session_2*/logs/*")):
            if log.is_file() and log.stat().st_size:
                lines += [f"--- {log.name}", log.read_text(errors="replace")[-2000:]]
        return "\n".join([*lines, self.stdout, self.stderr])

    def _differs_from(self, num_written: int) -> bool:
        return self.process.poll() is not None or self._num_written() != num_written

    def _num_written(self) -> int:
        """Return the size of the output and of the run's metrics."""
        files = (self._folder / name for name in ("stdout", "stderr", "run/metrics.jsonl"))
        return sum(file.stat().st_size for file in files if file.exists())

    def assert_no_processes_left(self, *, but: frozenset[str] | set[str] = frozenset()) -> None:
        """Check that every process of the run ends, except those with titles in `but`."""

        def rest() -> list[psutil.Process]:
            # looks at all processes of the machine only once those that are known have ended
            known = [p for p in self._seen if not has_ended(p) and process_title(p) not in but]
            return known or [p for p in self.find_live_processes() if process_title(p) not in but]

        assert wait_until(lambda: not rest()), rest()

    def find_leftovers(self) -> list[str]:
        """Return temporary files other than Ray's logs, and the run's files in shared memory, once it has ended."""
        here = [path for path in self.temporary.iterdir() if path.name != "ray"]
        return [str(path) for path in (*here, *self._mapped) if path.exists()]

    def assert_nothing_left(self) -> None:
        """Check that no process of the run is left, and no file other than Ray's logs."""
        self.assert_no_processes_left()
        assert not (left := self.find_leftovers()), left

    def end(self) -> None:
        """Kill all remaining processes of the run and remove its temporary files."""
        for process in self.find_live_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(HANG_SECONDS)
        shutil.rmtree(self.temporary, ignore_errors=True)


def _begin_command(at_death: signal.Signals) -> Callable[[], None]:
    """Return what a new process calls: it lets it end on SIGINT, and with the tests, even if those are killed."""
    parent = os.getpid()

    def begin() -> None:
        set_parent_death_signal(at_death, parent=parent)
        # background jobs of a shell ignore SIGINT, and their children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return begin


def run_program(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its exit code and output as text; it is killed if the tests are.

    Args:
        options: those of `subprocess.run`.
    """
    options = {"timeout": HANG_SECONDS, "preexec_fn": _begin_command(signal.SIGKILL)} | options
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)


def run_to_end(folder: Path, *arguments: str | Path) -> None:
    """Run a `megarl` command, with its output in `folder`, to its end, at which no process may be left."""
    command = LaunchedCommand(folder, *arguments)
    try:
        assert command.wait() == 0, command.stdout + command.stderr
        command.assert_no_processes_left(but=RAY_AGENTS)
    finally:
        command.end()


def gained(values: Sequence[float]) -> float:
    """Return the mean of the last 5 values minus the mean of the first 5."""
    return sum(values[-5:]) / 5 - sum(values[:5]) / 5


def last_step(run: Path) -> int:
    """Return the last step in the metrics of a run folder; 0 if there is none."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def list_steps(run: Path) -> list[dict[str, Any]]:
    """Return the metrics in a run folder, one row per step."""
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]  # the last one may be incomplete
    return [row for row in map(json.loads, lines) if "loss" in row]


def _mapped_shared_memory(process: psutil.Process) -> list[Path]:
    """Return the files in shared memory that the process has mapped, unless they have no name any more."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line[line.index("/") :] for line in lines if " /dev/shm/" in line)
    return [Path(path) for path in paths if not path.endswith(" (deleted)")]


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
