"""Batch job of a test, with all processes that descend from it."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.cluster.launch.slurm.cluster import ROOT, SlurmCluster
from tests.end_to_end.launched import MARKER, has_ended, last_step, process_title, run_program
from tests.time_limits import END_SECONDS, HANG_SECONDS, UNREACHED_SECONDS, wait_until

SCRIPTS = ROOT / "launch/slurm"
SLURMD_NODENAME = "SLURMD_NODENAME"
POLL_SECONDS = 0.5
LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""
DONE = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Job:
    """A submitted script of launch/slurm; its output goes to `folder`/log."""

    def __init__(self, cluster: SlurmCluster, folder: Path, script: str, *arguments, options=(), **knobs: str) -> None:
        """`options`: options of sbatch; `knobs`: environment variables."""
        self._cluster, self._folder, self._mark = cluster, folder, uuid.uuid4().hex
        # not in `folder`: the paths of Ray's sockets begin with it, and their length is limited
        self.temporary = Path(tempfile.mkdtemp(prefix="m"))
        environment = {MARKER: self._mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "VENV": sys.prefix}
        environment |= dict.fromkeys(("JOIN_TIMEOUT", "NODE_TIMEOUT"), str(int(UNREACHED_SECONDS)))
        self.id = cluster.run(
            *("sbatch", "--parsable", f"--output={folder / 'log'}", *options, SCRIPTS / script, *arguments),
            environment=environment | knobs,
        )
        self._seen: set[psutil.Process] = set()
        self._sockets: set[int] = set()

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

    def wait(self) -> int:
        """Wait for the job to end and return its exit code; record its processes meanwhile."""
        assert self._wait_until(lambda: self.has_ended), self.output
        return int(self.field("ExitCode").partition(":")[0])

    def wait_for_output(self, text: str) -> None:
        """Block until the output contains `text` or the job ends; fail if it does not contain `text`."""
        self._wait_until(lambda: text in self.output or self.has_ended)
        assert text in self.output, f"no {text!r} within {HANG_SECONDS:g} s:\n{self.output}"

    def last_step(self) -> int:
        return last_step(self._folder / "run")

    def wait_for_step(self, step: int) -> None:
        """Block until the run has finished `step` or the job ends; fail if it has not finished `step`."""
        self._wait_until(lambda: self.last_step() >= step or self.has_ended)
        assert self.last_step() >= step, f"step {step} not within {HANG_SECONDS:g} s:\n{self.output}"

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Return whether the condition came true in time; polls rarely, since polling takes CPU time from the job."""
        deadline = time.monotonic() + HANG_SECONDS
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
        """Return the processes of the job that have not ended; record the sockets that they listen on."""
        pids = {process.pid for process in self._seen if process.is_running()}
        for process in psutil.process_iter():
            if process.pid not in pids and self._belongs_to_job(process, pids):
                self._seen.add(process)
                pids.add(process.pid)
        live = [process for process in self._seen if not has_ended(process)]
        listening = _listening_sockets()
        for process in live:
            self._sockets |= listening & _open_sockets(process)
        return live

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

    def assert_nothing_is_left(self, seconds: float = END_SECONDS) -> None:
        """Assert that within `seconds` all processes of the job end and nothing keeps their listening sockets open."""
        assert self._seen, "no process of the job was recorded"
        assert wait_until(lambda: not self.find_live_processes(), seconds), [
            (p.pid, process_title(p)) for p in self.find_live_processes()
        ]
        assert not self._sockets & _listening_sockets()

    def end(self) -> None:
        """Kill all remaining processes of the job."""
        for options in (("--signal=KILL", "--full"), ()):
            # fails if the job has ended
            run_program("scancel", "--quiet", *options, self.id, env=self._cluster.environment)
        for process in self.find_live_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _listening_sockets() -> set[int]:
    """Return the inodes of all listening TCP sockets (proc_net_tcp(5)); another job may reuse a port, not an inode."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return {int(row[9]) for row in rows if row[3] == LISTENING}


def _open_sockets(process: psutil.Process) -> set[int]:
    """Return the inodes of the sockets that a process has open; none if it has ended."""
    try:
        links = [os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # the process, or a file, was closed meanwhile
        return set()
    return {int(link.removeprefix("socket:[").removesuffix("]")) for link in links if link.startswith("socket:[")}
