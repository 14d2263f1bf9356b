"""Creation of process groups for weight syncs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.errors import WeightSyncError
from megarl.reshard.transfer.transport import Transport


def make_group(rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create a process group for each of `groups`, ranks ascending, and return that of `rank`.

    Returns None if `rank` is alone in its group or in none. Collective over all ranks, which have to pass the same
    groups: torch requires every rank to take part in creating every group.
    """
    mine = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(sorted(ranks))
            mine = group if rank in ranks else mine
    return mine


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group created by `make_group` or `make_sync_group`; None is ignored."""
    if group is not None:
        dist.destroy_process_group(group)


def make_sync_group(timeout_seconds: float) -> dist.ProcessGroup:
    """Create a group of all ranks that only syncs use, so that a failed sync breaks nothing else. Collective.

    Args:
        timeout_seconds: timeout of a sync.
    """
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    return group


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Rendezvous address and parameters of a process group between otherwise unrelated processes; plain data."""

    host: str
    port: int
    name: str
    """Unique per group, so that leftovers of a failed group in the store are not mistaken for the next one."""
    size: int
    timeout_seconds: float
    """Timeout of connecting, and of a sync over the group."""
    backend: str = "gloo"
    """Torch backend: `gloo` or `nccl`."""


def open_store(host: str) -> TCPStore:
    """Open a store in this process, on any free port, for a rendezvous; it closes with the object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def connect_group(transfer_group: TransferGroup, rank: int, plan: str) -> Transport:
    """Connect to the other ranks of `transfer_group` as rank `rank` and return the transport.

    Args:
        plan: fingerprint of the plan that this rank will execute.

    Raises:
        WeightSyncError: the store does not answer, another rank did not connect in time, or a rank has another plan
            (not checked later: gloo aborts a process that receives more than it expects).
    """
    timeout = timedelta(seconds=transfer_group.timeout_seconds)
    try:
        store = PrefixStore(transfer_group.name, TCPStore(transfer_group.host, transfer_group.port, timeout=timeout))
        if store.compare_set("plan", "", plan) != plan.encode():
            raise WeightSyncError(
                f"rank {rank} of {transfer_group.size} has another plan than the rank that connected first"
            )
        if transfer_group.backend == "nccl":
            return _connect_nccl(store, transfer_group, rank)
        group = dist.ProcessGroupGloo(store, rank, transfer_group.size, timeout)
    except (RuntimeError, ValueError) as e:
        raise WeightSyncError(
            f"rank {rank} of {transfer_group.size} could not connect to the other ranks at "
            f"{transfer_group.host}:{transfer_group.port} within {transfer_group.timeout_seconds:g} s: "
            f"{str(e).splitlines()[0]}"
        ) from e
    return Transport(group, timeout_seconds=transfer_group.timeout_seconds, is_exclusive=True, coalesces=False)


def _connect_nccl(store: Store, transfer_group: TransferGroup, rank: int) -> Transport:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=transfer_group.timeout_seconds)
    group = dist.ProcessGroup(store, rank, transfer_group.size)
    backend = dist.ProcessGroupNCCL(store, rank, transfer_group.size, options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return Transport(group, timeout_seconds=transfer_group.timeout_seconds, is_exclusive=True, coalesces=True)
