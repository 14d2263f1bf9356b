"""The actor that runs on every node while the cluster is checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from megarl.errors import WorkerError
from megarl.preflight.cluster.node_report import NodeFacts, ProbeRequest, collect_facts, versions
from megarl.preflight.cluster.reachability import Address, EchoServer, probe

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One node's part of an all-reduce check, in which each rank contributes `rank + 1`."""

    backend: Backend
    host: str
    port: int
    """Port of the TCPStore at `host`."""
    rank: int
    size: int
    timeout_seconds: float
    gpu: int | None
    """Index of the GPU to use among those that the process sees; None: CPU."""


class ProbeActor:
    """Probes its own node and its connections to others; hosted by a Ray actor."""

    def __init__(self) -> None:
        # importing torch takes seconds: do it in the background during the calls that need no torch
        self._torch_import = threading.Thread(target=import_module, args=("torch.distributed",), daemon=True)
        self._torch_import.start()
        self._echo_server: EchoServer | None = None
        self._store: Store | None = None

    def versions(self) -> dict[str, str | None]:
        """Return `NodeReport.versions`; plain types only, so that a node with another megarl can be read."""
        return versions()

    def clock(self) -> float:
        """Return this node's time in Unix seconds."""
        return time.time()

    def collect_facts(self, request: ProbeRequest) -> NodeFacts:
        """Return the hardware, network and file system facts of this node."""
        return collect_facts(request)

    def start_echo_server(self, name: str, address: str) -> int:
        """Start an `EchoServer` and return its port."""
        self._echo_server = EchoServer(name, address=address)
        return self._echo_server.port

    def probe(self, own_name: str, addresses: Sequence[Address], seconds: float) -> list[tuple[Address, str]]:
        """Probe the echo servers of all nodes but this one; return those not reached, with the reason.

        Args:
            own_name: name of this node's echo server.
            addresses: the addresses of all nodes.
        """
        others = [address for address in addresses if address.name != own_name]
        reasons = zip(others, probe(others, seconds=seconds), strict=True)
        return [(address, reason) for address, reason in reasons if reason is not None]

    def open_store(self, address: str, seconds: float) -> int:
        """Start the TCPStore for all-reduce checks and return its port."""
        self._torch_import.join()
        from torch._C._distributed_c10d import TCPStore

        store = self._store = TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        return store.port

    def all_reduce(self, reduction: Reduction) -> None:
        """Take part in the all-reduce and check the sum.

        Raises:
            WorkerError: the sum is wrong.
            RuntimeError: torch.distributed reported an error.
        """
        # a second import at the same time may find torch._C without its submodules, which torch adds later
        self._torch_import.join()
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        timeout = timedelta(seconds=reduction.timeout_seconds)
        device = torch.device("cpu") if reduction.gpu is None else torch.device("cuda", reduction.gpu)
        store = TCPStore(reduction.host, reduction.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            reduction.backend,
            store=PrefixStore(reduction.backend, store),
            rank=reduction.rank,
            world_size=reduction.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        number = torch.tensor(reduction.rank + 1, device=device)
        dist.all_reduce(number)
        total, want = int(number), reduction.size * (reduction.size + 1) // 2
        dist.destroy_process_group()
        if total != want:
            raise WorkerError(f"the sum over {reduction.size} nodes is {total}, not {want}")
