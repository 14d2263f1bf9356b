"""Creation of process groups for weight syncs; every group is connected on all ranks when its creation returns.

NCCL connects the ranks of a group at its first use, in which every rank has to take part. A sync in which some rank has
no messages would hang, and a rank that is missing would be noticed late.

The trainer ranks exchange their layouts: each sends what it holds once, as a compressed table of boxes.

    rank r      digest of the model's tensors | boxes, as indices into these tensors      about 1 kB, no names
    all ranks   by rank, its layout; equal tables become one object, and are decoded when they are first used

All ranks have the model's tensors themselves, and no rank needs the names of another rank's local tensors. What is sent
is what the ranks really hold, so it also holds for model families outside of the package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.piece_table import PieceTable
from megarl.reshard.transfer.heartbeat import HeartbeatSpec, list_ranks
from megarl.reshard.transfer.transport import Transport

MAX_RANKS_SHOWN = 5
"""Number of ranks that an error message names."""


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of each rank of torch's default group, by rank. Collective."""
    gathered = [data] * dist.get_world_size()
    dist.all_gather_object(gathered, data)
    return gathered


def exchange_layouts(
    layout: WeightLayout, rank: int, all_gather: Callable[[bytes], Sequence[bytes]] = all_gather_bytes
) -> list[WeightLayout]:
    """Return the layout of each trainer rank; only that of `rank` has the names of local tensors. Collective.

    Raises WeightSyncError on all ranks if they hold different models.

    Args:
        layout: the layout that this rank holds.
        all_gather: sends bytes of any length to all ranks and returns those of all ranks, by rank.
    """
    digest = layout.tensors.digest
    gathered = all_gather(digest + layout.pieces.to_bytes())
    digests = [data[: len(digest)] for data in gathered]
    others = [str(other) for other, held in enumerate(digests) if held != digests[0]]
    if others:
        raise WeightSyncError(
            f"the trainer ranks hold different models: the names, shapes or dtypes of all tensors on rank "
            f"{', '.join(others[:MAX_RANKS_SHOWN])} are not those on rank 0"
        )
    names = layout.tensors.names
    tables = {data: PieceTable.from_bytes(data[len(digest) :], names) for data in dict.fromkeys(gathered)}
    layouts = {data: WeightLayout(layout.tensors, table) for data, table in tables.items()}
    by_rank = [layouts[data] for data in gathered]
    by_rank[rank] = layout
    return by_rank


type TransportMaker = Callable[[Any, float], Transport]
"""Function that makes the transport of a sync from its group and timeout in seconds, without connecting the ranks."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

_ALL_HERE, _YES = "all here", "yes"
"""Key of the store that ends the waits of connecting ranks, and its value if all have come."""

_NCCL_TIMEOUT = timedelta(days=1)
"""Torch's timeout of NCCL's works in a sync, which have a deadline of their own: see `Transport`."""


def make_group(rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create and connect a process group for each of `groups`, ranks ascending, and return that of `rank`.

    Returns None if `rank` is alone in its group or in none. Collective over all ranks, which have to pass the same
    groups: torch requires every rank to take part in creating every group. Raises WeightSyncError if a member does not
    connect within the timeout of torch's default group.
    """
    mine = None
    for ranks in groups:
        if len(ranks) > 1:
            group = _new_group(sorted(ranks))
            mine = group if rank in ranks else mine
    if mine is not None:
        Transport(mine).connect()
    return mine


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise a WeightSyncError that the block raises on any rank on every rank, with that rank's number. Collective.

    For work before a collective call, such as the creation of groups, in which the other ranks would wait forever.
    """
    error: WeightSyncError | None = None
    try:
        yield
    except WeightSyncError as e:
        error = e
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    for rank, message in enumerate(messages):
        if message is not None:
            raise WeightSyncError(f"rank {rank}: {message}") from error


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group created by `make_group` or `make_sync_transport`; None is ignored."""
    if group is not None:
        dist.destroy_process_group(group)


def make_sync_transport(
    timeout_seconds: float, make_transport: TransportMaker | None = None, heartbeat: HeartbeatSpec | None = None
) -> tuple[dist.ProcessGroup, Transport]:
    """Create and connect a group of all ranks that only syncs use, so that a failed sync breaks nothing else.

    Collective. Raises WeightSyncError if another rank did not connect in time.

    Args:
        timeout_seconds: timeout of connecting, and of a sync.
        make_transport: None: a `Transport` over the group.
        heartbeat: where the ranks leave their heartbeats; None: they give none, and no sync is aborted on all ranks.
    """
    group = _new_group(None, timedelta(seconds=timeout_seconds))
    if make_transport is None:
        transport = Transport(group, timeout_seconds=timeout_seconds, is_exclusive=True)
    else:
        transport = make_transport(group, timeout_seconds)
    transport.connect()
    if heartbeat is not None:
        transport.start_heartbeat(heartbeat, group.rank())
    return group, transport


def _new_group(ranks: Sequence[int] | None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    with _errors_handled_by_transport():
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout)
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl":
        dist.distributed_c10d._set_pg_timeout(_NCCL_TIMEOUT, group)
    return group


@contextmanager
def _errors_handled_by_transport() -> Iterator[None]:
    """Create NCCL groups in this block whose errors and timeouts do not make torch's watchdog end the process."""
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGroup(HeartbeatSpec):
    """Rendezvous address and parameters of a process group between otherwise unrelated processes; plain data."""

    timeout_seconds: float
    """Timeout of connecting, and of a sync over the group."""
    backend: str | TransportMaker = "gloo"
    """`gloo`, `nccl`, or a picklable function that makes the transport over gloo."""


def connect_group(transfer_group: TransferGroup, rank: int, plan: str) -> Transport:
    """Connect to the other ranks of `transfer_group` as rank `rank`; return the transport once all are connected.

    Args:
        plan: fingerprint of the plan that this rank will execute.

    Raises:
        WeightSyncError: the store does not answer, another rank did not connect in time, or a rank has another plan
            (not checked later: gloo aborts a process that receives more than it expects).
    """
    seconds, size = transfer_group.timeout_seconds, transfer_group.size
    timeout, store = timedelta(seconds=seconds), None
    try:
        store = PrefixStore(transfer_group.name, TCPStore(transfer_group.host, transfer_group.port, timeout=timeout))
        if store.compare_set("plan", "", plan) != plan.encode():
            raise WeightSyncError(f"rank {rank} of {size} has another plan than the rank that connected first")
        _wait_for_all(store, rank, size, timeout)
        transport = _make_transport(store, transfer_group, rank, timeout)
    except (RuntimeError, ValueError) as e:
        missing = [] if store is None else _missing_ranks(store, size)
        reason = f"nothing from {list_ranks(missing)}" if missing else str(e).splitlines()[0]
        raise WeightSyncError(
            f"rank {rank} of {size} could not connect to the other ranks at "
            f"{transfer_group.host}:{transfer_group.port} within {seconds:g} s: {reason}"
        ) from e
    transport.connect()
    transport.start_heartbeat(transfer_group, rank)
    return transport


def _wait_for_all(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until every rank has called this: the connecting of NCCL itself has no timeout.

    Raises WeightSyncError if the connecting was aborted, RuntimeError if a rank is late or the store does not answer.
    """
    store.set(f"rank {rank}", "here")
    if store.add("count", 1) == size:
        store.compare_set(_ALL_HERE, "", _YES)
    store.wait([_ALL_HERE], timeout)
    answer = store.get(_ALL_HERE).decode()
    if answer != _YES:
        raise WeightSyncError(f"the connecting was aborted: {answer}")


def abort_connect(transfer_group: TransferGroup, store: Store, reason: str) -> None:
    """End the waits of the ranks that are in `connect_group`, because another rank will not come.

    Args:
        store: that of the ranks, in the process of its owner.
    """
    PrefixStore(transfer_group.name, store).compare_set(_ALL_HERE, "", reason)


def _missing_ranks(store: Store, size: int) -> list[int]:
    """Return the ranks that have not called `_wait_for_all`; empty if the store does not answer."""
    try:
        return [rank for rank in range(size) if not store.check([f"rank {rank}"])]
    except RuntimeError:
        return []


def _make_transport(store: Store, transfer_group: TransferGroup, rank: int, timeout: timedelta) -> Transport:
    size, seconds = transfer_group.size, transfer_group.timeout_seconds
    if transfer_group.backend != "nccl":
        group = dist.ProcessGroupGloo(store, rank, size, timeout)
        if callable(transfer_group.backend):
            return transfer_group.backend(group, seconds)
        return Transport(group, timeout_seconds=seconds, is_exclusive=True, coalesces=False)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_TIMEOUT
    device = torch.device("cuda", torch.cuda.current_device())
    with _errors_handled_by_transport():
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    nccl_group = dist.ProcessGroup(store, rank, size)
    nccl_group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    backend.eager_connect_single_device(device)
    return Transport(nccl_group, timeout_seconds=seconds, is_exclusive=True, coalesces=True)
