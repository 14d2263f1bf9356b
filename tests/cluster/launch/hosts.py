"""Several simulated hosts on one machine, which share a network and files but nothing else.

    host a                            switch                            host b
    eth0 10.77.0.1 ------------------ p0  p1 ------------------ eth0 10.77.0.2
    own loopback, name, processes,                              own loopback, name, processes,
    /tmp, /dev/shm, /etc/hosts                                  /tmp, /dev/shm, /etc/hosts

Each host is a set of Linux namespaces, kept alive by an idle process. All processes of the host end with the idle
process, which ends with this one. As on Debian, a host's name resolves to 127.0.1.1 on the host itself, and to its
address elsewhere.

The switch is a bridge of the kernel, in a set of namespaces of its own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

from tests.end_to_end.launched import has_ended, run_program
from tests.required_tools import skip_or_fail
from tests.time_limits import END_SECONDS, HANG_SECONDS, wait_until

PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount", "hostname")
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
IDLE_COMMAND = ("env", "--ignore-signal=CHLD", "sleep", "infinity")
"""The first process of a host, which adopts orphans; since it ignores SIGCHLD, the kernel reaps them."""

SETUP_SCRIPT = """
set -e
hostname "$1"; private=$2; hosts=$3; shift 3
ip link set lo up
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$hosts" /etc/hosts
mount -t tmpfs tmpfs "$private"
for folder; do
    mkdir -p "$private/${folder#/tmp/}"
    mount --bind "$folder" "$private/${folder#/tmp/}"
done
mount --rbind "$private" /tmp
echo ready
exec """ + " ".join(IDLE_COMMAND)
"""Arguments: host name, folder for its /tmp, file for its /etc/hosts, and folders of /tmp that all hosts share."""
EXCLUDED_VARIABLES = ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@cache
def missing() -> str | None:
    """Return why this machine cannot simulate hosts; None if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"needs the programs {', '.join(lacking)}"
    bridge = ("ip", "link", "add", "br0", "type", "bridge")
    tried = run_program("unshare", *NAMESPACES, "--fork", "--mount-proc", *bridge)
    return f"no namespaces or no bridge: {tried.stderr.strip()}" if tried.returncode else None


class Command:
    """A running command on a host; its output goes to files."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="output-", dir=folder))
        with (self._folder / "stdout").open("w") as out, (self._folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
            )

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def send(self, number: signal.Signals) -> None:
        """Signal the command itself, not the nsenter process that started it."""
        (command,) = psutil.Process(self.process.pid).children()
        command.send_signal(number)

    def wait(self) -> int:
        """Wait for the command to end and return its exit code."""
        assert wait_until(lambda: self.process.poll() is not None), f"still running:\n{self.stdout}{self.stderr}"
        return self.process.wait()

    def wait_for_output(self, text: str) -> None:
        """Block until the output contains `text` or the command ends; fail if it does not contain `text`."""
        wait_until(lambda: text in self.stdout + self.stderr or self.process.poll() is not None)
        assert text in self.stdout + self.stderr, f"no {text!r}:\n{self.stdout}{self.stderr}"


class Host:
    """One simulated host, as described in the module docstring."""

    def __init__(self, name: str, address: str, folder: Path, prepare: Sequence[str]) -> None:
        """`folder`: for output of its commands; `prepare`: prints `ready` and becomes the first process."""
        self.name, self.address, self._folder = name, address, folder
        held = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(
            [*held, *prepare], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", self._holder.communicate()
        (first,) = psutil.Process(self._holder.pid).children()
        self.pid = first.pid
        self._space = os.readlink(f"/proc/{self.pid}/ns/pid")

    def nsenter_command(self, *arguments: object) -> list[str]:
        """Return the command line that runs `arguments` on the host, in the current working directory."""
        here = ["nsenter", "--target", str(self.pid), *NAMESPACES, f"--wdns={Path.cwd()}", "--"]
        return here + [str(argument) for argument in arguments]

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of commands on the host: this process's without network settings, plus `variables`."""
        kept = {name: value for name, value in os.environ.items() if name not in EXCLUDED_VARIABLES}
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return kept | {"PATH": programs, "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"} | variables

    def run(self, *arguments: object) -> str:
        """Run a command that must succeed, and return its stdout."""
        done = run_program(*self.nsenter_command(*arguments), env=self.environment())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *arguments: object, **variables: str) -> Command:
        """Start a command; PATH begins with the folder of this Python."""
        return Command(self.nsenter_command(*arguments), self.environment(**variables), self._folder)

    def plug(self, interface: str, *what: str) -> None:
        """Create a network interface; `what` may contain process ids of this machine."""
        command = ["nsenter", "--target", str(self.pid), "--net", "ip", "link", "add", interface, *what]
        subprocess.run(command, check=True)

    def processes(self) -> list[psutil.Process]:
        """Return the processes on the host, without its idle process."""
        return [
            each
            for each in psutil.process_iter()
            if each.pid != self.pid and self._is_on_host(each) and not has_ended(each)
        ]

    def _is_on_host(self, process: psutil.Process) -> bool:
        try:
            return os.readlink(f"/proc/{process.pid}/ns/pid") == self._space
        except OSError:
            return False

    def assert_nothing_runs(self, seconds: float = END_SECONDS) -> None:
        """Assert that every process on the host ends within `seconds`."""
        assert wait_until(lambda: not self.processes(), seconds), f"on {self.name}: {self.processes()}"

    def power_off(self) -> None:
        """Kill all processes of the host at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(HANG_SECONDS)


class Hosts:
    """`number` hosts named a, b, ... and the switch between them; they live until the `with` block ends.

    Skips the test that uses them on a machine that cannot simulate hosts.
    """

    def __init__(self, number: int, folder: Path, *, shared: Sequence[Path] = ()) -> None:
        """Args:
        folder: folder for files of the hosts themselves.
        shared: folders below /tmp that all hosts see; outside of /tmp they see everything.
        """
        self._names = [chr(ord("a") + i) for i in range(number)]
        self._folder = folder
        everything = [Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), folder, *shared]
        self._shared = [str(path) for path in everything if path.is_relative_to("/tmp")]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        reason = missing()
        if reason is not None:
            skip_or_fail(reason)
        with self._stack as stack:
            self._switch = self._start_host("switch", "", ["sh", "-c", f"echo ready; exec {' '.join(IDLE_COMMAND)}"])
            self._switch.run("ip", "link", "add", "br0", "up", "type", "bridge")
            self._hosts = [self._make_host(i) for i in range(len(self._names))]
            for i, host in enumerate(self._hosts):
                self._switch.plug(f"p{i}", "up", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
                host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
                host.run("ip", "link", "set", "eth0", "up")
                self.rejoin(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def torchrun(self, *module: object, local_addr: bool = True, **variables: str) -> list[Command]:
        """Start torchrun with one rank on each host; the rendezvous is on host a, addressed by name.

        Args:
            variables: environment variables of the ranks.
        """
        common = ["torchrun", f"--nnodes={len(self._hosts)}", "--nproc-per-node=1"]
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self._hosts[0].name}:29400"]
        own = {host: ["--local-addr", host.address] if local_addr else [] for host in self}
        return [host.start(*common, *rendezvous, *own[host], "-m", *module, **variables) for host in self]

    def ssh(self, folder: Path) -> Path:
        """Write a program that runs a command on a host as ssh does: in a shell with a fresh environment."""
        program = folder / "ssh"
        nsenter_command = "".join(f"{host.name}) set -- {shlex.join(host.nsenter_command())} ;;\n" for host in self)
        enter = 'exec "$@" env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "cd; $command"\n'
        program.write_text(
            f"#!/bin/sh\nname=$1; shift; command=$*\ncase $name in\n{nsenter_command}*) exit 255 ;;\nesac\n{enter}"
        )
        program.chmod(0o755)
        return program

    def cut_off(self, host: Host) -> None:
        """Drop all network frames from and to the host, silently: its interface remains up."""
        self._switch.run("ip", "link", "set", f"p{self._hosts.index(host)}", "nomaster")

    def rejoin(self, host: Host) -> None:
        """Forward network frames from and to the host again."""
        self._switch.run("ip", "link", "set", f"p{self._hosts.index(host)}", "master", "br0")

    def _make_host(self, index: int) -> Host:
        addresses = {name: f"10.77.0.{i}" for i, name in enumerate(self._names, start=1)}
        name = self._names[index]
        private, lookup = self._folder / f"{name}.tmp", self._folder / f"{name}.hosts"
        private.mkdir()
        known = {"localhost": "127.0.0.1"} | addresses | {name: "127.0.1.1"}
        lookup.write_text("".join(f"{address} {other}\n" for other, address in known.items()))
        prepare = ["sh", "-c", SETUP_SCRIPT, "sh", name, str(private), str(lookup), *self._shared]
        return self._start_host(name, addresses[name], prepare)

    def _start_host(self, name: str, address: str, prepare: Sequence[str]) -> Host:
        host = Host(name, address, self._folder, prepare)
        self._stack.callback(host.power_off)
        return host
