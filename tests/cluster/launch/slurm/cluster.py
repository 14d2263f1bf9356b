"""Slurm cluster of two nodes on this machine, separate from any Slurm installed on it."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megarl.cluster.process.ports import find_unused_ports
from tests.end_to_end.launched import run_program
from tests.time_limits import HANG_SECONDS, wait_until

ROOT = Path(__file__).parents[4]
"""The checkout, from which jobs are submitted."""
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
# jobs must end on SIGTERM: they are not killed after it before the tests' time limit
KillWait=1200
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


def missing() -> str | None:
    """Return why this machine cannot run Slurm's daemons; None if it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons run jobs as their users only as root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs the programs {', '.join(lacking)}: make setup-test-tools" if lacking else None


class SlurmCluster:
    """munged, slurmctld and two slurmd in a temporary folder, on free ports."""

    def __init__(self) -> None:
        # not in pytest's folder: munge requires a folder that all users can enter
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))
        self.folder.chmod(0o711)
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        configuration = self.folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=self.folder, host=host, ports=find_unused_ports(3)))
        self.environment = os.environ | {"SLURM_CONF": str(configuration)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons and block until both nodes are idle."""
        self._start_munge()
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self._start(node, "slurmd", "-D", "-N", node)
        idle = wait_until(lambda: self._num_idle() == len(NODES))
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
        assert wait_until((self.folder / "munge.socket").exists)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("w") as out:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, start_new_session=True)
            )

    def _num_idle(self) -> int:
        # fails until slurmctld listens
        done = run_program("sinfo", "--noheader", "--states=idle", "--format=%D", env=self.environment)
        return sum(map(int, done.stdout.split()))

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> str:
        """Run one of Slurm's programs in the checkout and return its stdout."""
        done = run_program(*command, cwd=ROOT, env=self.environment | (environment or {}))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def wait_until_idle(self) -> None:
        """Block until no node runs a job."""
        assert wait_until(lambda: self._num_idle() == len(NODES)), self.run("sinfo", "-lN")

    def end(self) -> None:
        """Cancel all jobs and terminate the daemons."""
        if self._num_idle() < len(NODES):
            for options in (["--signal=KILL", "--full"], []):
                subprocess.run(["scancel", *options, "--user=root"], env=self.environment, check=False)
            wait_until(lambda: self._num_idle() == len(NODES))
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(HANG_SECONDS)
        shutil.rmtree(self.folder)
