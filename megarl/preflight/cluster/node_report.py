"""What a node says of itself before anything heavy starts there; asked in a process of its own, without torch."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import megarl
from megarl.placement.hardware import Gpu, free_shared_memory, gpus, package_version
from megarl.preflight.cluster.reachability import Interface, gloo_interface

PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers")
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Of which an environment has one: torch's build decides."""

SOURCE = "megarl source"
"""Key of `versions` for the hash of megarl's own files: two checkouts may differ and have the same version."""

WEIGHED = (".safetensors", ".json")
"""Files of a model's folder that must be as large on one node as on another."""

LOOKS = 3
LOOK_SECONDS = 0.5
"""A network file system may show a new file a moment late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What all nodes are asked about the file system."""

    readable: Mapping[str, str]
    """Key of the configuration -> a file or folder that every node must see."""
    writable: Mapping[str, str]
    """Key -> a folder that every node must write; the asking node has put a file there."""
    token: str
    """Name of those files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport:
    """What a node sees at a path."""

    key: str
    path: str
    trouble: str | None = None
    """Why it cannot be used."""
    num_bytes: int | None = None
    """Of the file, or of the model in the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is different from node to node, or may be."""

    cores: int
    memory_bytes: int
    """Free."""
    shared_memory_bytes: int | None
    """Free in /dev/shm; None where there is none."""
    gpus: tuple[Gpu, ...]
    gloo: Interface
    nccl: str | None
    """NCCL_SOCKET_IFNAME."""
    paths: tuple[PathReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A node's, beside the asking node's."""

    ahead_seconds: float
    uncertainty_seconds: float
    """Half of the time that asking took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """All that is known of a node."""

    name: str
    """As people know it."""
    address: str
    """Ray's."""
    gpus: int
    """That Ray was told of."""
    failure: str | None = None
    """Why it did not answer; what it was asked from there on is missing."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Of Python, megarl and the packages that a run needs; None where one is not installed."""
    clock: Clock | None = None
    facts: NodeFacts | None = None


def versions() -> dict[str, str | None]:
    """By package; see `NodeReport`."""
    return {
        "Python": platform.python_version(),
        "megarl": megarl.__version__,
        SOURCE: source_hash(Path(megarl.__file__).parent),
        **{package: package_version(package) for package in PACKAGES},
        "NCCL": next(filter(None, map(package_version, NCCL_PACKAGES)), None),
    }


def source_hash(package: Path) -> str:
    """8 hexadecimal digits of all Python files below a folder, their names and contents."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def collect(question: Question) -> NodeFacts:
    """This node's answer."""
    return NodeFacts(
        cores=len(psutil.Process().cpu_affinity() or []),
        memory_bytes=psutil.virtual_memory().available,
        shared_memory_bytes=free_shared_memory(),
        gpus=tuple(gpus()),
        gloo=gloo_interface(),
        nccl=os.environ.get("NCCL_SOCKET_IFNAME"),
        paths=(
            *(look_at(key, Path(path)) for key, path in question.readable.items()),
            *(write_beside(key, Path(path), question.token) for key, path in question.writable.items()),
        ),
    )


def look_at(key: str, path: Path) -> PathReport:
    """What is at `path`, a file or a model's folder that must be readable."""
    try:
        if path.is_dir():
            files = [file for file in path.iterdir() if file.suffix in WEIGHED]
            return PathReport(key=key, path=str(path), num_bytes=sum(file.stat().st_size for file in files))
        with path.open("rb") as file:
            return PathReport(key=key, path=str(path), num_bytes=os.fstat(file.fileno()).st_size)
    except OSError as error:
        return PathReport(key=key, path=str(path), trouble=_trouble(key, path, error))


def write_beside(key: str, folder: Path, token: str) -> PathReport:
    """Whether the folder can be written, and is the one in which the asking node has put the file `token`."""
    mine = folder / f"{token}-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        mine.touch(exist_ok=False)
        mine.unlink()
    except OSError as error:
        return PathReport(key=key, path=str(folder), trouble=_trouble(key, folder, error))
    for look in range(LOOKS):
        if (folder / token).exists():
            return PathReport(key=key, path=str(folder))
        if look < LOOKS - 1:
            time.sleep(LOOK_SECONDS)
    trouble = f"{key} {folder} is another folder than the asking node's; is the file system shared?"
    return PathReport(key=key, path=str(folder), trouble=trouble)


def _trouble(key: str, path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"cannot see {key} {path}; is the file system shared?"
    return f"cannot use {key} {path}: {error.strerror}"
