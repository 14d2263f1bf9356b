"""What runs on every node while the cluster is checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from megarl.errors import WorkerError
from megarl.preflight.cluster.node_report import NodeFacts, Question, collect, versions
from megarl.preflight.cluster.reachability import Address, Door, knock

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A sum over nodes, of which this one adds `rank + 1`."""

    backend: Backend
    host: str
    port: int
    """Where the nodes meet."""
    rank: int
    size: int
    timeout_seconds: float
    gpu: int | None
    """Index of the GPU that it takes among those that the process sees."""


class NodeAgent:
    """Hosted by a Ray actor on each node."""

    def __init__(self) -> None:
        # torch takes seconds to import: it does so while the node is asked what needs no torch
        threading.Thread(target=import_module, args=("torch.distributed",), daemon=True).start()
        self._door: Door | None = None
        self._store: Store | None = None

    def versions(self) -> dict[str, str | None]:
        """See `NodeReport`; of plain types, which nodes with another megarl have as well."""
        return versions()

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def collect(self, question: Question) -> NodeFacts:
        """What this node has."""
        return collect(question)

    def open_door(self, name: str, address: str) -> int:
        """The port at which other nodes can knock from now on; see `Door`."""
        self._door = Door(name, address=address)
        return self._door.port

    def knock(self, addresses: Sequence[Address], seconds: float) -> list[str | None]:
        """See `megarl.preflight.cluster.reachability.knock`."""
        return knock(addresses, seconds=seconds)

    def open_store(self, address: str, seconds: float) -> int:
        """The port at which the nodes meet for reductions."""
        from torch._C._distributed_c10d import TCPStore

        store = self._store = TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        return store.port

    def reduce(self, reduction: Reduction) -> None:
        """Return once the sum over all nodes is here.

        Raises:
            WorkerError: it is not the sum of all.
            RuntimeError: as torch says what went wrong.
        """
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
