"""What one rank of a large run spends on weight sync: it receives its messages, plans, keeps its plan, and syncs.

The rank is a forked child of the benchmark, so that the growth of its memory can be read, and of what it inherits it
uses only the layout that it would hold. Weights are tensors on torch's meta device: views and copies cost their time
in Python and in torch's dispatch, but move no bytes. The transport is one that sends nothing.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megarl.reshard.layout.layout import WeightLayout, local_extents
from megarl.reshard.planning.plan_cache import RoundPlan
from megarl.reshard.transfer import executor as executor_module
from megarl.reshard.transfer.bucket import Parameters, ShardSink, torch_dtype
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.transport import InFlight, Message, Transport

MB = 1e6


@dataclass(kw_only=True)
class RankCost:
    """What a rank spends; seconds are CPU seconds, megabytes 10**6 bytes."""

    connect_cpu_seconds: float = 0.0
    """From the first message of the controller to the plan, without making process groups."""
    connect_host_mb: float = 0.0
    """Growth of anonymous memory from before the first message to after the plan, which is kept."""
    connect_peak_mb: float = 0.0
    """The same at its peak."""
    sync_cpu_seconds: float = 0.0
    """One execution of the plan, without torch.distributed's own calls, kernels and copies."""
    engine_rank_connect_cpu_seconds: float = 0.0
    """What the colocated engine rank on this rank's slot spends to prepare for its boxes."""
    engine_rank_sync_cpu_seconds: float = 0.0
    """What it spends in one sync to copy them, without kernels and copies."""
    groups: int = 0
    """Groups of messages that it posts in one sync."""
    p2p_calls: int = 0
    """Messages that it sends and receives in one sync."""
    buffer_bytes: int = 0
    """Memory of its buffers in one sync."""
    peers_outside_machine: int = 0
    """Ranks on other machines that this rank sends to or receives from."""


class _NoTransport(Transport):
    """A transport whose messages have arrived as soon as they are started."""

    def __init__(self) -> None:
        super().__init__(coalesces=False)
        self.groups = self.p2p_calls = 0

    def _begin_all(
        self, group: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[InFlight], list[InFlight]]:
        self.groups += 1
        self.p2p_calls += len(sends) + len(receives)
        return [], []


@dataclass
class _MetaBuffer:
    """A bucket on the meta device."""

    num_bytes: int
    path: str = "/proc/1/fd/1"
    bytes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device="meta")

    def close(self) -> None: ...


def in_child[T](work: Callable[[], T]) -> T:
    """Return `work()`, run in a forked child."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            writer.send(work())
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    writer.close()
    try:
        result: T = reader.recv()
    except EOFError:
        raise RuntimeError("the child of the benchmark has failed") from None
    finally:
        os.waitpid(pid, 0)
    return result


class MemoryGrowth:
    """Growth of this process's anonymous memory since the object was made, in 10**6 bytes."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise new objects would use memory that was freed before
        self._anonymous, self._peak = _anonymous_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def kept_mb(self) -> float:
        """Return the growth that is left after a garbage collection."""
        gc.collect()
        return (_anonymous_bytes() - self._anonymous) / MB

    def peak_mb(self) -> float:
        """Return the growth of the peak of all resident memory; 0 if it is below a peak from before."""
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._peak) / MB


def _anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@contextmanager
def meta_buckets() -> Any:
    """Make the buckets of executors on the meta device."""
    with patch.object(executor_module, "make_buffer", lambda num_bytes, device: _MetaBuffer(num_bytes)):
        yield


def meta_tensors(layout: WeightLayout) -> dict[str, Tensor]:
    """Return the tensors of which the layout's pieces are parts, on the meta device, as large as the pieces reach."""
    table, columns = layout.pieces, layout.pieces.columns
    extents, dims = local_extents(table, columns.width).tolist(), [0] * len(table.locals)
    dtypes = [torch.uint8] * len(dims)
    for local, tensor, count in zip(
        *(each.tolist() for each in (columns.local, columns.tensor, columns.dims)), strict=True
    ):
        dims[local], dtypes[local] = count, torch_dtype(layout.tensors.specs[tensor].dtype)
    return {
        name: torch.empty(extents[i][: dims[i]], dtype=dtypes[i], device="meta") for i, name in enumerate(table.locals)
    }


def measure_sync(
    cost: RankCost, rank: int, plan: RoundPlan, held: Mapping[str, Tensor], sink: ShardSink | Parameters | None
) -> None:
    """Execute the plan five times; the best CPU seconds count, as other work on the machine adds to them."""
    seconds = []
    for _ in range(5):
        with meta_buckets(), torch.no_grad():
            began = time.thread_time()
            transport = _NoTransport()
            executor = BoxExecutor(rank, plan.rounds, plan.buffer_sizes, transport=transport)
            executor.run(held, sink)
            seconds.append(time.thread_time() - began)
    cost.sync_cpu_seconds = min(seconds)
    cost.groups, cost.p2p_calls = transport.groups, transport.p2p_calls
    cost.buffer_bytes = plan.buffer_sizes.total


def peers_outside_machine(rank: int, plan: RoundPlan, nodes: Sequence[int]) -> int:
    """Return the number of ranks on other machines that the rank exchanges messages with."""
    peers: set[int] = set()
    for hop in (hop for this in plan.rounds for hop in this.hops):
        peers.update(message.to for message in hop.sends)
        peers.update(message.source for message in hop.receives)
    return sum(nodes[peer] != nodes[rank] for peer in peers)
