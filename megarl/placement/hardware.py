"""Hardware and packages of this node, queried without torch, and the sizes of Ray's objects on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

QUERY_TIMEOUT_SECONDS = 20.0
"""Time limit of nvidia-smi; a node that has just started needs a few seconds."""

MIN_OBJECT_STORE_BYTES = 128 * 2**20
"""Minimum size of Ray's object store."""

INLINE_VARIABLE = "RAY_max_direct_call_object_size"
"""Environment variable of Ray: results of up to so many bytes are sent to the caller of a process that has it."""

INLINE_BYTES = 16 * 1024
"""Value of `INLINE_VARIABLE`. With Ray's own 100 kB, most groups of completions would pass through the controller: it
would hold them, and send them along with each reference."""

GPU_FIELDS = ("index", "uuid", "driver_version", "memory.total", "memory.used", "name")
"""Field names of nvidia-smi; the GPU name comes last, since it may contain commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A CUDA device, as the driver reports it."""

    index: int
    """Index of the GPU on its node."""
    uuid: str
    """`GPU-` and 32 hexadecimal digits, in groups."""
    name: str
    driver: str
    """Version of the NVIDIA driver."""
    memory_bytes: int | None
    """Total memory; None if the driver does not report it, as for a GPU that shares the host's memory."""
    used_bytes: int | None
    """Used memory; None if the driver does not report it."""


def list_gpus() -> list[Gpu]:
    """Return the CUDA devices that a process started here would see, in its order; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(  # noqa: S603 -- a fixed command line
            [command, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode:
        return []
    found = [_gpu(line) for line in answer.stdout.splitlines() if line.strip()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if chosen is None else choose_visible(found, chosen)


def choose_visible(gpus: Sequence[Gpu], chosen: str) -> list[Gpu]:
    """Return the GPUs that CUDA shows with `chosen` as CUDA_VISIBLE_DEVICES, in its order.

    The words are indices, or beginnings of UUIDs that belong to one GPU only. The first invalid word ends the list, and
    a GPU that is named twice hides all. Of MIG instances, CUDA shows the first.
    """
    words = chosen.split(",")
    if words[0].startswith("MIG-"):
        parents = [gpu for gpu in gpus if words[0].startswith(f"MIG-{gpu.uuid}/") or "GPU-" not in words[0]]
        return [replace(gpu, memory_bytes=None, used_bytes=None) for gpu in parents[:1]]
    by_uuid = words[0].startswith("GPU-")
    names = [*takewhile(lambda word: word.startswith("GPU-"), words)] if by_uuid else [*_leading_numbers(words)]
    if len(set(names)) < len(names):
        return []
    visible: list[Gpu] = []
    for name in names:
        found = [gpu for gpu in gpus if (gpu.uuid.startswith(str(name)) if by_uuid else gpu.index == name)]
        if len(found) != 1:
            break
        if found[0] in visible:
            return []
        visible += found
    return visible


def _leading_numbers(words: Sequence[str]) -> Iterator[int]:
    """Yield the number that each word begins with, as strtol does, up to the first that is negative or has none."""
    for word in words:
        number = re.match(r"\s*([+-]?[0-9]+)", word)
        if number is None or int(number[1]) < 0:
            return
        yield int(number[1])


def visible_gpu_names() -> list[str]:
    """Return the names of the GPUs that `list_gpus` returns."""
    return [gpu.name for gpu in list_gpus()]


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def object_store_bytes(*, max_bytes: int) -> int:
    """Return the size of Ray's object store in bytes: a quarter of the free space in /dev/shm, at most `max_bytes`.

    PyTorch and further Ray nodes on this machine need the rest.
    """
    stat = os.statvfs("/dev/shm")  # noqa: S108 -- where Ray keeps its object store
    return max(MIN_OBJECT_STORE_BYTES, min(max_bytes, stat.f_bavail * stat.f_frsize // 4))


def inline_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that keeps large results in the object store, unless `environment` has it already.

    Processes of Ray inherit the variable from the process that has started Ray.
    """
    return {} if INLINE_VARIABLE in environment else {INLINE_VARIABLE: str(INLINE_BYTES)}


def free_shared_memory() -> int | None:
    """Return the free bytes in /dev/shm; None if there is no such folder."""
    folder = Path("/dev/shm")  # noqa: S108 -- only asked for its size
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _gpu(line: str) -> Gpu:
    index, uuid, driver, total, used, name = (word.strip() for word in line.split(",", len(GPU_FIELDS) - 1))
    return Gpu(
        index=int(index),
        uuid=uuid,
        name=name,
        driver=driver,
        memory_bytes=_mebibytes(total),
        used_bytes=_mebibytes(used),
    )


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None
