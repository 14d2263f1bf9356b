"""A batch job of a test, every process that descends from it, and what they leave behind."""

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

from tests.end_to_end.launched import MARKER, ended, name_of, wait_until
from tests.launch.slurm.cluster import ROOT, SlurmCluster

SCRIPTS = ROOT / "launch/slurm"

SLURMD_NODENAME = "SLURMD_NODENAME"

LOOK_SECONDS = 0.5

DONE = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Job:
    """Submits a script of launch/slurm; its output goes to `folder`/log."""

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        script: str,
        *arguments: str | Path,
        options: tuple[str, ...] = (),
        **knobs: str,
    ) -> None:
        """`options`: of sbatch; `knobs`: environment variables."""
        self._cluster, self._folder, self._mark = cluster, folder, uuid.uuid4().hex
        # not in `folder`: the names of Ray's sockets begin with it, and may not be long
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
        """What `scontrol show job` calls so."""
        shown = self._cluster.run("scontrol", "--oneliner", "show", "job", self.id)
        found = re.search(rf"\b{name}=(\S+)", shown)
        assert found, shown
        return found[1]

    @property
    def has_ended(self) -> bool:
        return self.field("JobState") in DONE

    def wait(self, seconds: float) -> int:
        """The exit code; learns the job's processes until then."""
        assert self._comes(lambda: self.has_ended, seconds), self.output
        return int(self.field("ExitCode").partition(":")[0])

    def wait_until_it_says(self, text: str, seconds: float) -> None:
        """Block until its output has `text`; the job must go on until then."""
        self._comes(lambda: text in self.output or self.has_ended, seconds)
        assert text in self.output, f"no {text!r} within {seconds} s:\n{self.output}"

    def steps_done(self) -> int:
        """The last step in metrics.jsonl of the run in `folder`/run."""
        file = self._folder / "run/metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Block until the run has finished `step`; the job must go on until then."""
        self._comes(lambda: self.steps_done() >= step or self.has_ended, seconds)
        assert self.steps_done() >= step, f"step {step} not within {seconds} s:\n{self.output}"

    def _comes(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true in time; looks seldom, for that takes CPU from the job."""
        deadline = time.monotonic() + seconds
        pause = LOOK_SECONDS / 16
        self.living()
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            self.living()
            pause = min(2 * pause, LOOK_SECONDS)
        return True

    def living(self) -> list[psutil.Process]:
        """Processes of the job that have not ended, wherever they went; learns the ports that they listen on."""
        pids = {process.pid for process in self._seen if process.is_running()}
        for process in psutil.process_iter():
            if process.pid not in pids and self._is_ours(process, pids):
                self._seen.add(process)
                pids.add(process.pid)
        living = [process for process in self._seen if not ended(process)]
        for process in living:
            self._ports |= _listening(process)
        return living

    def node_of(self, process: psutil.Process) -> str | None:
        """The node of Slurm that it runs on, which it or the process that it comes from was told."""
        for each in (process, *process.parents()):
            if SLURMD_NODENAME in (environment := each.environ()):
                return environment[SLURMD_NODENAME]
        return None

    def _is_ours(self, process: psutil.Process, pids: set[int]) -> bool:
        try:
            if process.ppid() in pids:
                return True
            # a process that renames itself, as some of Ray's do, may have overwritten this
            return process.environ().get(MARKER) == self._mark
        except psutil.Error:
            return False

    def cancel(self, *options: str) -> None:
        """`scancel` it."""
        self.living()
        self._cluster.run("scancel", *options, self.id)

    def assert_nothing_is_left(self, seconds: float) -> None:
        """Within `seconds`, every process of the job has ended, and nobody listens where one of them did."""
        assert self._seen, "the job's processes were never looked at"
        assert wait_until(lambda: not self.living(), seconds), [(p.pid, name_of(p)) for p in self.living()]
        open_ports = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert not self._ports & open_ports

    def end(self) -> None:
        """Kill whatever is left of the job."""
        for options in (("--signal=KILL", "--full"), ()):
            subprocess.run(
                ["scancel", "--quiet", *options, self.id],
                env=self._cluster.environment,
                check=False,  # it may have ended
            )
        for process in self.living():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _listening(process: psutil.Process) -> set[int]:
    try:
        return {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()
