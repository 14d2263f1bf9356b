"""What a node reports about itself: versions, hardware, paths, reachable addresses. Imports neither torch nor Ray.

Each node starts a server on a free port that sends its name to every client. Other nodes connect to each of its
addresses and compare the name, since another host may answer at an address that is not unique, such as a container
bridge's.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

import megarl
from megarl.cluster.placement.hardware import Gpu, free_shared_memory, list_gpus, package_version

MAX_PARALLEL_PROBES = 64
"""Connections attempted at the same time."""

MAX_NAME_BYTES = 256
"""Maximum length of a server's name in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The network interface that gloo listens on."""

    name: str
    """Value of GLOO_SOCKET_IFNAME, or the interface that has `address`; empty if none has it."""
    address: str | None
    """IP address; None if the interface does not exist or has no address."""
    is_chosen: bool
    """Whether GLOO_SOCKET_IFNAME sets it; otherwise gloo resolves the host name."""

    @property
    def is_loopback(self) -> bool:
        """Whether the address is a loopback address, which other nodes cannot reach."""
        return self.address is not None and ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address at which a node's echo server should be reachable."""

    name: str
    """Name of the echo server."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EchoServer:
    """TCP server that sends its name to every client, until it is closed or the process exits."""

    def __init__(self, name: str, *, address: str) -> None:
        """`address`: an address of this node in the family, IPv4 or IPv6, that clients will use."""
        self._name = name.encode()
        assert len(self._name) <= MAX_NAME_BYTES, name
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections and close the socket."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the server thread, which close alone does not
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # the socket was closed
            with client, contextlib.suppress(OSError):  # the client disconnected
                client.sendall(self._name)


def probe(addresses: Sequence[Address], *, seconds: float) -> list[str | None]:
    """Return, for each address, why its server cannot be reached within `seconds`; None if it can."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), MAX_PARALLEL_PROBES)) as pool:
        return list(pool.map(lambda address: _probe(address, seconds), addresses))


def _probe(address: Address, seconds: float) -> str | None:
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=seconds) as connection,
            connection.makefile("rb") as reply,
        ):
            name = reply.read(MAX_NAME_BYTES)
    except OSError as error:
        return (error.strerror or str(error)).lower()  # a timeout has no strerror
    return None if name == address.name.encode() else "another host answers at this address"


def gloo_interface() -> Interface:
    """Return the interface that gloo will choose in a process with the current environment."""
    interfaces = {
        name: [each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        first, *_ = chosen.split(",")  # gloo rotates over several; the first one is checked
        return Interface(name=first, address=next(iter(interfaces.get(first, [])), None), is_chosen=True)
    address = _hostname_address()
    name = next((name for name, addresses in interfaces.items() if address in addresses), "")
    return Interface(name=name, address=address, is_chosen=False)


def _hostname_address() -> str:
    """Return the first address of this host's name that a socket can bind to; 127.0.0.1 if there is none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, error_type, protocol, _, target in found:
        with socket.socket(family, error_type, protocol) as probe:
            try:
                probe.bind(target)
            except OSError:
                continue
        return str(target[0])
    return "127.0.0.1"


PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers")
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""An environment has one of these, depending on torch's build."""

SOURCE = "megarl source"
"""Key in `versions` of the hash of megarl's source files: two checkouts of one version may differ."""

SIZE_CHECKED_SUFFIXES = (".safetensors", ".json")
"""Suffixes of the files in a model folder whose total size must be equal on all nodes."""

HUB_SNAPSHOTS = "snapshots"
"""Name of the folder that has the models downloaded from the Hugging Face Hub, in the cache of the driver's node."""

FILE_ATTEMPTS = 3
FILE_POLL_SECONDS = 0.5
"""Interval between attempts: a network file system may show a new file late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The paths that every node is to check."""

    readable: Mapping[str, str]
    """Configuration key -> file or folder that every node must read."""
    writable: Mapping[str, str]
    """Configuration key -> folder that every node must write; the driver has created a marker file in it."""
    token: str
    """File name of the markers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport:
    """What a node finds at a path."""

    key: str
    path: str
    trouble: str | None = None
    """Why the path cannot be used; None if it can."""
    num_bytes: int | None = None
    """Size of the file, or of the model files in the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that may differ from node to node."""

    cores: int
    memory_bytes: int
    """Available memory in bytes."""
    shared_memory_bytes: int | None
    """Free bytes in /dev/shm; None if it does not exist."""
    gpus: tuple[Gpu, ...]
    gloo: Interface
    nccl: str | None
    """Value of NCCL_SOCKET_IFNAME; None if it is not set."""
    paths: tuple[PathReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Offset of a node's clock from the driver's."""

    ahead_seconds: float
    uncertainty_seconds: float
    """Half of the round-trip time of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Everything learned about a node."""

    name: str
    """Node name for messages."""
    address: str
    """IP address by which Ray knows the node."""
    gpus: int
    """Number of GPUs that Ray was started with."""
    failure: str | None = None
    """Why the node did not reply; fields collected after that are missing."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Package name -> version, also of Python and megarl; None if not installed."""
    clock: Clock | None = None
    facts: NodeFacts | None = None


def versions() -> dict[str, str | None]:
    """Return the versions of Python, megarl and its dependencies, see `NodeReport.versions`."""
    return {
        "Python": platform.python_version(),
        "megarl": megarl.__version__,
        SOURCE: source_hash(*map(package_folder, ("megarl", "megarl_kernels"))),
        **{package: package_version(package) for package in PACKAGES},
        "NCCL": next(filter(None, map(package_version, NCCL_PACKAGES)), None),
    }


def package_folder(name: str) -> Path:
    """Return the folder of a package, without importing it."""
    spec = find_spec(name)
    assert spec is not None, name
    assert spec.origin is not None, name
    return Path(spec.origin).parent


def source_hash(*packages: Path) -> str:
    """Return 8 hexadecimal digits that hash the names and contents of all Python files below some folders."""
    digest = hashlib.blake2b(digest_size=4)
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def collect_facts(request: ProbeRequest) -> NodeFacts:
    """Collect this node's facts, including the requested paths."""
    return NodeFacts(
        cores=len(psutil.Process().cpu_affinity() or []),
        memory_bytes=psutil.virtual_memory().available,
        shared_memory_bytes=free_shared_memory(),
        gpus=tuple(list_gpus()),
        gloo=gloo_interface(),
        nccl=os.environ.get("NCCL_SOCKET_IFNAME"),
        paths=(
            *(check_readable(key, Path(path)) for key, path in request.readable.items()),
            *(check_writable(key, Path(path), request.token) for key, path in request.writable.items()),
        ),
    )


def check_readable(key: str, path: Path) -> PathReport:
    """Check that a file or model folder can be read, and return its size."""
    try:
        if path.is_dir():
            files = [file for file in path.iterdir() if file.suffix in SIZE_CHECKED_SUFFIXES]
            return PathReport(key=key, path=str(path), num_bytes=sum(file.stat().st_size for file in files))
        with path.open("rb") as file:
            return PathReport(key=key, path=str(path), num_bytes=os.fstat(file.fileno()).st_size)
    except OSError as error:
        return PathReport(key=key, path=str(path), trouble=_describe_error(key, path, error))


def check_writable(key: str, folder: Path, token: str) -> PathReport:
    """Check that the folder can be written and contains the driver's marker file `token`."""
    mine = folder / f"{token}-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        mine.touch(exist_ok=False)
        mine.unlink()
    except OSError as error:
        return PathReport(key=key, path=str(folder), trouble=_describe_error(key, folder, error))
    for look in range(FILE_ATTEMPTS):
        if (folder / token).exists():
            return PathReport(key=key, path=str(folder))
        if look < FILE_ATTEMPTS - 1:
            time.sleep(FILE_POLL_SECONDS)
    trouble = f"{key} {folder} is not the driver's folder of that path; is the file system shared?"
    return PathReport(key=key, path=str(folder), trouble=trouble)


def _describe_error(key: str, path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if path.parent.name == HUB_SNAPSHOTS:
            return f"cannot see {key} {path}; is HF_HOME set to a folder that all nodes share?"
        return f"cannot see {key} {path}; is the file system shared?"
    return f"cannot use {key} {path}: {error.strerror}"
