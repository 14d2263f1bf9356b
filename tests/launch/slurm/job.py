"""Batch job of a test, with all processes that descend from it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.end_to_end.launched import MARKER, has_ended, process_title, wait_until
from tests.launch.slurm.cluster import ROOT, SlurmCluster

SCRIPTS = ROOT / "launch/slurm"

SLURMD_NODENAME = "SLURMD_NODENAME"

POLL_SECONDS = 0.5

DONE = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Job:
    """A submitted script of launch/slurm; its output goes to `folder`/log."""

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        script: str,
        *arguments: str | Path,
        options: tuple[str, ...] = (),
        **knobs: str,
    ) -> None:
        """`options`: options of sbatch; `knobs`: environment variables."""
        self._cluster, self._folder, self._mark = cluster, folder, uuid.uuid4().hex
        # not in `folder`: the paths of Ray's sockets begin with it, and their length is limited
        self.temporary = Path(tempfile.mkdtemp(prefix="m"))
        environment = {MARKER: self._mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "VENV": sys.prefix}
        self.submitted = time.time()
        self.id = cluster.run(
            *("sbatch", "--parsable", f"--output={folder / 'log'}", *options, SCRIPTS / script, *arguments),
            environment=environment | knobs,
        )
        self._seen: set[psutil.Process] = set()
        self._ports: set[int] = set()

    @property
    def output(self) -> str:
        log = self._folder / "log"
        return log.read_text() if log.exists() else ""

    def field(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        shown = self._cluster.run("scontrol", "--oneliner", "show", "job", self.id)
        found = re.search(rf"\b{name}=(\S+)", shown)
        assert found, shown
        return found[1]

    @property
    def has_ended(self) -> bool:
        return self.field("JobState") in DONE

    def wait(self, seconds: float) -> int:
        """Wait for the job to end and return its exit code; record its processes meanwhile."""
        assert self._wait_until(lambda: self.has_ended, seconds), self.output
        return int(self.field("ExitCode").partition(":")[0])

    def wait_for_output(self, text: str, seconds: float) -> None:
        """Block until the output contains `text` or the job ends; fail if it does not contain `text`."""
        self._wait_until(lambda: text in self.output or self.has_ended, seconds)
        assert text in self.output, f"no {text!r} within {seconds} s:\n{self.output}"

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl of the run in `folder`/run; 0 if there is none."""
        file = self._folder / "run/metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Block until the run has finished `step` or the job ends; fail if it has not finished `step`."""
        self._wait_until(lambda: self.last_step() >= step or self.has_ended, seconds)
        assert self.last_step() >= step, f"step {step} not within {seconds} s:\n{self.output}"

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return whether the condition came true in time; polls rarely, since polling takes CPU time from the job."""
        deadline = time.monotonic() + seconds
        pause = POLL_SECONDS / 16
        self.find_live_processes()
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            self.find_live_processes()
            pause = min(2 * pause, POLL_SECONDS)
        return True

    def find_live_processes(self) -> list[psutil.Process]:
        """Return the processes of the job that have not ended; record the ports that they listen on."""
        pids = {process.pid for process in self._seen if process.is_running()}
        for process in psutil.process_iter():
            if process.pid not in pids and self._belongs_to_job(process, pids):
                self._seen.add(process)
                pids.add(process.pid)
        find_live_processes = [process for process in self._seen if not has_ended(process)]
        for process in find_live_processes:
            self._ports |= _listening_ports(process)
        return find_live_processes

    def node_of(self, process: psutil.Process) -> str | None:
        """Return the Slurm node of a process, from its environment or that of an ancestor."""
        for each in (process, *process.parents()):
            if SLURMD_NODENAME in (environment := each.environ()):
                return environment[SLURMD_NODENAME]
        return None

    def _belongs_to_job(self, process: psutil.Process, pids: set[int]) -> bool:
        try:
            if process.ppid() in pids:
                return True
            # processes that rename themselves, as some of Ray's do, may have overwritten their environment
            return process.environ().get(MARKER) == self._mark
        except psutil.Error:
            return False

    def cancel(self, *options: str) -> None:
        """Run `scancel` for the job."""
        self.find_live_processes()
        self._cluster.run("scancel", *options, self.id)

    def assert_nothing_is_left(self, seconds: float) -> None:
        """Assert that within `seconds` all processes of the job end and their ports are closed."""
        assert self._seen, "no process of the job was recorded"
        assert wait_until(lambda: not self.find_live_processes(), seconds), [
            (p.pid, process_title(p)) for p in self.find_live_processes()
        ]
        open_ports = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert not self._ports & open_ports

    def end(self) -> None:
        """Kill all remaining processes of the job."""
        for options in (("--signal=KILL", "--full"), ()):
            subprocess.run(
                ["scancel", "--quiet", *options, self.id],
                env=self._cluster.environment,
                check=False,  # the job may have ended already
            )
        for process in self.find_live_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _listening_ports(process: psutil.Process) -> set[int]:
    try:
        return {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()
