"""Several hosts on one machine: what runs on one of them shares with the others a network and the files, nothing else.

    host a                            switch                            host b
    eth0 10.77.0.1 ------------------ p0  p1 ------------------ eth0 10.77.0.2
    own loopback, name, processes,                              own loopback, name, processes,
    /tmp, /dev/shm, /etc/hosts                                  /tmp, /dev/shm, /etc/hosts

Each is a set of Linux namespaces, held by a process that does nothing; everything ends with it, and it ends with this
one. As Debian sets machines up, a host's own name resolves to 127.0.1.1 there, and to its address elsewhere.

The switch is a bridge of the kernel. With a delay it is `relay.py` in its place, always: many kernels have no netem.
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
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

from tests.end_to_end.launched import ended, wait_until

PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount", "hostname")

NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")

IDLE = ("env", "--ignore-signal=CHLD", "sleep", "infinity")
"""The first process of a host, which adopts orphans: with SIGCHLD ignored, the kernel buries them."""

PREPARE = """
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
exec """ + " ".join(IDLE)
"""Arguments: the host's name, a folder to put its /tmp in, its /etc/hosts, and folders of /tmp that hosts share."""

STAYS_OUT = ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def missing() -> str | None:
    """Why this machine cannot pose as several; None where it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"needs the programs {', '.join(lacking)}"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces or no bridge: {tried.stderr.strip()}" if tried.returncode else None


class Command:
    """A command that runs on a host; its output goes to files."""

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
        """Signal the command itself, not the program that took it to the host."""
        (command,) = psutil.Process(self.process.pid).children()
        command.send_signal(number)

    def wait(self, seconds: float) -> int:
        """The exit code."""
        assert wait_until(lambda: self.process.poll() is not None, seconds), f"goes on:\n{self.stdout}{self.stderr}"
        return self.process.wait()

    def wait_until_it_says(self, text: str, seconds: float) -> None:
        """Block until its output has `text`; the command must go on until then."""
        wait_until(lambda: text in self.stdout + self.stderr or self.process.poll() is not None, seconds)
        assert text in self.stdout + self.stderr, f"no {text!r}:\n{self.stdout}{self.stderr}"


class Host:
    """One of several; see the module."""

    def __init__(self, name: str, address: str, folder: Path, prepare: Sequence[str]) -> None:
        """`folder`: for the output of its commands; `prepare`: becomes its first process once it has said `ready`."""
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

    def entering(self, *arguments: object) -> list[str]:
        """The command line that runs `arguments` on the host, in this process's folder."""
        here = ["nsenter", "--target", str(self.pid), *NAMESPACES, f"--wdns={Path.cwd()}", "--"]
        return here + [str(argument) for argument in arguments]

    def environment(self, **variables: str) -> dict[str, str]:
        """What commands on the host see: this process's variables but those about its own network, and `variables`."""
        kept = {name: value for name, value in os.environ.items() if name not in STAYS_OUT}
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return kept | {"PATH": programs, "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"} | variables

    def run(self, *arguments: object, seconds: float = 60) -> str:
        """Stdout of a command, which must succeed."""
        done = subprocess.run(
            self.entering(*arguments),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *arguments: object, **variables: str) -> Command:
        """A command, running; this Python's programs come first."""
        return Command(self.entering(*arguments), self.environment(**variables), self._folder)

    def plug(self, interface: str, *what: str) -> None:
        """Make a network interface; `what` may name processes as they are called here."""
        command = ["nsenter", "--target", str(self.pid), "--net", "ip", "link", "add", interface, *what]
        subprocess.run(command, check=True)

    def processes(self) -> list[psutil.Process]:
        """What runs there, without the process that holds the host."""
        return [each for each in psutil.process_iter() if each.pid != self.pid and self._has(each) and not ended(each)]

    def _has(self, process: psutil.Process) -> bool:
        try:
            return os.readlink(f"/proc/{process.pid}/ns/pid") == self._space
        except OSError:
            return False

    def assert_nothing_runs(self, seconds: float) -> None:
        """Every process on the host has ended within `seconds`."""
        assert wait_until(lambda: not self.processes(), seconds), f"on {self.name}: {self.processes()}"

    def power_off(self) -> None:
        """Everything on it ends at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(10)


class Switch(Protocol):
    """What the hosts' cables end in."""

    def cut(self, port: str) -> None:
        """Lose every frame from and to this port, silently: its host still sees a working cable."""
        ...

    def join(self, port: str) -> None:
        """Carry them again."""
        ...


class Bridge:
    """Of the kernel."""

    def __init__(self, room: Host, ports: Sequence[str]) -> None:
        self._room = room
        room.run("ip", "link", "add", "br0", "up", "type", "bridge")
        for port in ports:
            self.join(port)

    def cut(self, port: str) -> None:
        """See `Switch`."""
        self._room.run("ip", "link", "set", port, "nomaster")

    def join(self, port: str) -> None:
        """See `Switch`."""
        self._room.run("ip", "link", "set", port, "master", "br0")


class Relay:
    """`relay.py`, with a delay in seconds for every frame."""

    def __init__(self, room: Host, ports: Sequence[str], delay: float) -> None:
        program = room.entering(sys.executable, "-S", Path(__file__).with_name("relay.py"), str(delay), *ports)
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._await_ok()

    def cut(self, port: str) -> None:
        """See `Switch`."""
        self._order(f"cut {port}\n")

    def join(self, port: str) -> None:
        """See `Switch`."""
        self._order(f"join {port}\n")

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._await_ok()

    def _await_ok(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ok\n", "the relay has ended"


class Hosts:
    """`number` hosts a, b, ... and the switch between them, until the `with` block ends."""

    def __init__(self, number: int, folder: Path, *, shared: Sequence[Path] = (), delay: float = 0.0) -> None:
        """Args:
        folder: for files of the hosts themselves.
        shared: folders that all hosts see; outside /tmp they see everything.
        delay: seconds that a frame takes from one host to another.
        """
        self._names = [chr(ord("a") + i) for i in range(number)]
        self._folder, self._delay = folder, delay
        everything = [Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), folder, *shared]
        self._shared = [str(path) for path in everything if path.is_relative_to("/tmp")]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        with self._stack as stack:
            room = self._up("switch", "", ["sh", "-c", f"echo ready; exec {' '.join(IDLE)}"])
            self._hosts = [self._host(i) for i in range(len(self._names))]
            ports = [f"p{i}" for i in range(len(self._names))]
            for port, host in zip(ports, self._hosts, strict=True):
                room.plug(port, "up", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
                host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
                host.run("ip", "link", "set", "eth0", "up")
            self._switch: Switch = Relay(room, ports, self._delay) if self._delay else Bridge(room, ports)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def torchrun(self, *module: object, local_addr: bool = True) -> list[Command]:
        """An agent with one process on each host; a keeps the meeting, and knows it by its own name."""
        common = ["torchrun", f"--nnodes={len(self._hosts)}", "--nproc-per-node=1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self._hosts[0].name}:29400"]
        own = {host: ["--local-addr", host.address] if local_addr else [] for host in self}
        return [host.start(*common, *meeting, *own[host], "-m", *module) for host in self]

    def ssh(self, folder: Path) -> Path:
        """A program that runs a command on a host as ssh does: in a shell, and with an environment of its own."""
        program = folder / "ssh"
        entering = "".join(f"{host.name}) set -- {shlex.join(host.entering())} ;;\n" for host in self)
        enter = 'exec "$@" env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "cd; $command"\n'
        program.write_text(
            f"#!/bin/sh\nname=$1; shift; command=$*\ncase $name in\n{entering}*) exit 255 ;;\nesac\n{enter}"
        )
        program.chmod(0o755)
        return program

    def cut_off(self, host: Host) -> None:
        """From now on, none of its frames arrives, and none arrives there; nobody is told."""
        self._switch.cut(f"p{self._hosts.index(host)}")

    def rejoin(self, host: Host) -> None:
        """Frames come and go again."""
        self._switch.join(f"p{self._hosts.index(host)}")

    def _host(self, index: int) -> Host:
        addresses = {name: f"10.77.0.{i}" for i, name in enumerate(self._names, start=1)}
        name = self._names[index]
        private, lookup = self._folder / f"{name}.tmp", self._folder / f"{name}.hosts"
        private.mkdir()
        known = {"localhost": "127.0.0.1"} | addresses | {name: "127.0.1.1"}
        lookup.write_text("".join(f"{address} {other}\n" for other, address in known.items()))
        prepare = ["sh", "-c", PREPARE, "sh", name, str(private), str(lookup), *self._shared]
        return self._up(name, addresses[name], prepare)

    def _up(self, name: str, address: str, prepare: Sequence[str]) -> Host:
        host = Host(name, address, self._folder, prepare)
        self._stack.callback(host.power_off)
        return host
