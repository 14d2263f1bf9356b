"""Hardware, network interfaces and packages of this node, queried without torch, and the sizes of Ray's objects."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import psutil

from megarl.errors import ConfigError

Capability: TypeAlias = tuple[int, int]
"""CUDA compute capability, major and minor."""
HOPPER: Capability = (9, 0)
BLACKWELL: Capability = (10, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """A type of GPU; rates are those of NVIDIA's data sheets."""

    reported: str
    """Words of the name that CUDA reports."""
    capability: Capability
    flops_per_second: float
    """Dense matrix multiplications of bfloat16."""
    bytes_per_second: float | None = None
    """Of its memory; None if not known."""
    name: str = ""
    """With its memory in GB, as `megarl check --gpu` takes it; empty if it cannot."""
    mebibytes: int = 0
    """Memory as nvidia-smi prints it: less than the GB in the product's name. 0 without a name."""


GPU_TYPES = (
    GpuType(reported="GB200", capability=(10, 0), flops_per_second=2500e12, name="gb200-185", mebibytes=189_471),
    GpuType(
        reported="B200",
        capability=(10, 0),
        flops_per_second=2250e12,
        bytes_per_second=8.0e12,
        name="b200-180",
        mebibytes=183_359,
    ),
    GpuType(reported="GH200", capability=(9, 0), flops_per_second=989e12),
    GpuType(
        reported="H200",
        capability=(9, 0),
        flops_per_second=989e12,
        bytes_per_second=4.8e12,
        name="h200-141",
        mebibytes=143_771,
    ),
    GpuType(reported="H100 PCIe", capability=(9, 0), flops_per_second=756e12, bytes_per_second=2.0e12),
    GpuType(
        reported="H100 NVL",
        capability=(9, 0),
        flops_per_second=835e12,
        bytes_per_second=3.9e12,
        name="h100-94",
        mebibytes=95_830,
    ),
    GpuType(
        reported="H100",
        capability=(9, 0),
        flops_per_second=989e12,
        bytes_per_second=3.35e12,
        name="h100-80",
        mebibytes=81_559,
    ),
    GpuType(reported="H800", capability=(9, 0), flops_per_second=989e12),
    GpuType(reported="H20", capability=(9, 0), flops_per_second=148e12, name="h20-96", mebibytes=97_871),
    GpuType(
        reported="A100-SXM4-80GB",
        capability=(8, 0),
        flops_per_second=312e12,
        bytes_per_second=2.039e12,
        name="a100-80",
        mebibytes=81_920,
    ),
    GpuType(
        reported="A100",
        capability=(8, 0),
        flops_per_second=312e12,
        bytes_per_second=1.555e12,
        name="a100-40",
        mebibytes=40_960,
    ),
    GpuType(reported="A800", capability=(8, 0), flops_per_second=312e12),
    GpuType(reported="L40S", capability=(8, 9), flops_per_second=362e12, name="l40s-48", mebibytes=46_068),
    GpuType(reported="L4", capability=(8, 9), flops_per_second=121e12),
    GpuType(reported="A40", capability=(8, 6), flops_per_second=150e12),
    GpuType(reported="A10", capability=(8, 6), flops_per_second=125e12, name="a10-24", mebibytes=23_028),
)
"""Matched in this order with `torch.cuda.get_device_name()`: the first whose words occur in it."""


def find_gpu_type(reported: str) -> GpuType | None:
    """Return the type of a GPU by the name that CUDA reports; None if it is not listed."""
    return next((gpu for gpu in GPU_TYPES if re.search(rf"\b{gpu.reported}\b", reported)), None)


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


MASTER_KEY = "megarl/master"
"""Key in the store under which each rank writes the address that MASTER_ADDR resolves to for it."""


def interface_to(address: str) -> tuple[str, str]:
    """Return this node's own address on the route to `address` (an address or host name), and its interface.

    Reads the routing table; sends no packets.

    Raises:
        ConfigError: the name does not resolve, or there is no route.
    """
    try:
        family, target = _resolve(address)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            local: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"{socket.gethostname()} has no route to {address}: {error.strerror}") from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.partition("%")[0] == local for each in addresses):
            return local, name
    raise ConfigError(f"{socket.gethostname()} reaches {address} from {local}, which no interface of it has")


def interface_of(address: str) -> str | None:
    """Return the interface of this node that has `address`; None if there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, each in interfaces if address in (entry.address for entry in each)), None)


def interface_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make gloo and NCCL use `interface`, without those that `environment` already sets.

    By default gloo uses the interface that the host's own name resolves to, which is often the loopback.
    """
    variables = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }  # =: exact name
    return {name: value for name, value in variables.items() if name not in environment}


class Store(Protocol):
    """A key-value store that all ranks share, such as torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Set `key` to `value`."""
        ...

    def get(self, key: str) -> bytes:
        """Wait until `key` is set and return its value."""
        ...


def use_network_to_master(store: Store, rank: int, size: int) -> None:
    """Make gloo and NCCL use the interface that leads to MASTER_ADDR; all ranks call this before they join.

    On the master's own node MASTER_ADDR may resolve to the loopback. Its ranks then use the address that ranks on other
    nodes resolve it to.
    """
    master = os.environ["MASTER_ADDR"]
    local, interface = interface_to(master)
    store.set(f"{MASTER_KEY}/{rank}", _resolve(master)[1][0])
    if is_loopback(local):
        seen = (store.get(f"{MASTER_KEY}/{other}").decode() for other in range(size))
        outside = next((address for address in seen if not is_loopback(address)), local)
        _, interface = interface_to(outside)
    os.environ.update(interface_variables(interface, os.environ))


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    return family, target


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address."""
    return ip_address(address.partition("%")[0]).is_loopback
