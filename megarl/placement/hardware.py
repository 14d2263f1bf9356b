"""What this machine has, asked without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

QUERY_SECONDS = 20.0
"""How long the driver may take to tell of its GPUs; a machine that just started needs a few."""

LEAST_STORE = 128 * 2**20
"""Bytes of an object store."""

GPU_FACTS = ("index", "driver_version", "memory.total", "memory.used", "name")
"""As nvidia-smi calls them; the name last, since it may have commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A CUDA device, as the driver knows it."""

    index: int
    """On its machine."""
    name: str
    driver: str
    """Version of the machine's driver."""
    memory_bytes: int | None
    """None where the driver does not say, as where the GPU shares the host's memory."""
    used_bytes: int | None


def gpus() -> list[Gpu]:
    """The CUDA devices that a process started here would see, in its order; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(  # noqa: S603 -- a fixed command line
            [command, f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = [_gpu(line) for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    ids = [word.strip() for word in chosen.split(",") if word.strip()]
    if all(word.isdigit() for word in ids):
        return [found[int(word)] for word in ids if int(word) < len(found)]
    # GPU-<uuid> and MIG-<uuid>; "-1" hides all.
    return found[: len([word for word in ids if word != "-1"])]


def visible_gpus() -> list[str]:
    """Names of `gpus`."""
    return [gpu.name for gpu in gpus()]


def package_version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def store_bytes(*, most: int) -> int:
    """For Ray's object store: a quarter of what /dev/shm has left; PyTorch and further nodes here need the rest.

    Args:
        most: bytes.
    """
    stat = os.statvfs("/dev/shm")  # noqa: S108 -- where Ray keeps its object store
    return max(LEAST_STORE, min(most, stat.f_bavail * stat.f_frsize // 4))


def free_shared_memory() -> int | None:
    """Free bytes in /dev/shm; None where there is no such folder."""
    folder = Path("/dev/shm")  # noqa: S108 -- only asked for its size
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _gpu(line: str) -> Gpu:
    index, driver, total, used, name = (word.strip() for word in line.split(",", len(GPU_FACTS) - 1))
    return Gpu(index=int(index), name=name, driver=driver, memory_bytes=_mebibytes(total), used_bytes=_mebibytes(used))


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None
