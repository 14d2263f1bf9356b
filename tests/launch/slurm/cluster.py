"""A Slurm of two nodes on this machine, apart from any that the machine has, and jobs on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.end_to_end.launched import MARKER, ended, name_of, wait_until

ROOT = Path(__file__).parents[3]
"""The checkout, where jobs are submitted."""

SCRIPTS = ROOT / "launch/slurm"

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")

NODES = ("n1", "n2")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
# a heterogeneous job waits for the backfill scheduler, and a requeued one for its turn
SchedulerParameters=batch_sched_delay=0,bf_interval=1
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

SLURMD_NODENAME = "SLURMD_NODENAME"

START_SECONDS = 30.0

END_SECONDS = 45.0
"""Longer than Slurm's KillWait of 30, after which it kills what it has asked to end."""

DONE = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def missing() -> str | None:
    """Why this machine cannot run Slurm's daemons; None where it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons run jobs as their users only as root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs the programs {', '.join(lacking)}: make setup-slurm" if lacking else None


class SlurmCluster:
    """munged, slurmctld and two slurmd, in a temporary folder and on free ports."""

    def __init__(self) -> None:
        # not in pytest's folder: munge wants one that all users can enter
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))
        self.folder.chmod(0o711)
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        configuration = self.folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=self.folder, host=host, ports=_free_ports(3)))
        self.environment = os.environ | {"SLURM_CONF": str(configuration)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Block until both nodes are idle."""
        self._start_munge()
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self._start(node, "slurmd", "-D", "-N", node)
        idle = wait_until(lambda: self._num_idle() == len(NODES), START_SECONDS)
        assert idle, [path.read_text() for path in self.folder.glob("*.log")]

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._start(
            "munged", "munged", "--foreground", "--force", f"--seed-file={self.folder / 'munge.seed'}", *options
        )
        assert wait_until((self.folder / "munge.socket").exists, START_SECONDS)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("w") as out:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, start_new_session=True)
            )

    def _num_idle(self) -> int:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "--format=%D"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,  # fails until slurmctld listens
        )
        return sum(map(int, asked.stdout.split()))

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> str:
        """Stdout of one of Slurm's programs, run in the checkout."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment | (environment or {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def wait_until_idle(self, seconds: float = END_SECONDS) -> None:
        """Block until no node has a job."""
        assert wait_until(lambda: self._num_idle() == len(NODES), seconds), self.run("sinfo", "-lN")

    def end(self) -> None:
        """Cancel all jobs, and end the daemons."""
        if self._num_idle() < len(NODES):
            subprocess.run(["scancel", "--user=root"], env=self.environment, check=False)
            wait_until(lambda: self._num_idle() == len(NODES), END_SECONDS)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(END_SECONDS)
        shutil.rmtree(self.folder)


class Job:
    """A batch job of this test, its processes and the ports that they listened on; its output goes to `folder`/log."""

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

        def has_ended() -> bool:
            self.living()
            return self.has_ended

        assert wait_until(has_ended, seconds), self.output
        return int(self.field("ExitCode").partition(":")[0])

    def wait_until_it_says(self, text: str, seconds: float) -> None:
        """Block until its output has `text`; the job must go on until then."""
        wait_until(lambda: text in self.output or self.has_ended, seconds)
        assert text in self.output, f"no {text!r} within {seconds} s:\n{self.output}"
        self.living()

    def steps_done(self) -> int:
        """The last step in metrics.jsonl of the run in `folder`/run."""
        file = self._folder / "run/metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Block until the run has finished `step`; the job must go on until then."""
        wait_until(lambda: self.steps_done() >= step or self.has_ended, seconds)
        assert self.steps_done() >= step, f"step {step} not within {seconds} s:\n{self.output}"
        self.living()

    def living(self) -> list[psutil.Process]:
        """Processes of the job that have not ended, wherever they went; learns the ports that they listen on."""
        self._seen.update(process for process in psutil.process_iter() if self._is_ours(process))
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

    def _is_ours(self, process: psutil.Process) -> bool:
        if process in self._seen:
            return True
        try:
            if self._seen & {*process.parents()}:
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


def _free_ports(count: int) -> list[int]:
    """Different ones that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
