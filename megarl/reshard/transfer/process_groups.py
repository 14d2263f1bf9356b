"""Process groups over some of the ranks, made by all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.errors import WeightSyncError
from megarl.reshard.transfer.transport import Wire


def make_group(rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The process group of `rank`, ranks in ascending order; None where it is alone or in none of `groups`.

    Collective over all ranks, which pass the same groups: torch wants every rank at the making of every group.
    """
    mine = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(sorted(ranks))
            mine = group if rank in ranks else mine
    return mine


def free_group(group: dist.ProcessGroup | None) -> None:
    """End a group of `make_group` or `own_group`."""
    if group is not None:
        dist.destroy_process_group(group)


def own_group(timeout_seconds: float) -> dist.ProcessGroup:
    """A group of all ranks of torch's world, for syncs alone: one that failed does no harm beyond it. Collective.

    Args:
        timeout_seconds: how long a sync may take.
    """
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    return group


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where processes that share nothing else find each other; plain data."""

    host: str
    port: int
    name: str
    """Another one for every group: what is left of one that failed must not be taken for the next."""
    size: int
    timeout_seconds: float
    """How long ranks wait for each other, and how long a sync over the group may take."""
    backend: str = "gloo"
    """`gloo` or `nccl`."""


def open_store(host: str) -> TCPStore:
    """The store of this process at which others meet; its `port` is any free one. It ends with the object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def join_group(meeting: Meeting, rank: int, plan: str) -> Wire:
    """The wire over the group of all that join `meeting`, as its rank `rank`.

    Args:
        plan: identifies what this rank will send and receive over it.

    Raises:
        WeightSyncError: the store does not answer, another rank did not join in time, or one came with another plan:
            gloo aborts a process that is sent more than it takes.
    """
    timeout = timedelta(seconds=meeting.timeout_seconds)
    try:
        store = PrefixStore(meeting.name, TCPStore(meeting.host, meeting.port, timeout=timeout))
        if store.compare_set("plan", "", plan) != plan.encode():
            raise WeightSyncError(f"rank {rank} of {meeting.size} has planned something else than a rank that it joins")
        if meeting.backend == "nccl":
            return _join_nccl(store, meeting, rank)
        group = dist.ProcessGroupGloo(store, rank, meeting.size, timeout)
    except (RuntimeError, ValueError) as e:
        raise WeightSyncError(
            f"rank {rank} of {meeting.size} could not join the others at {meeting.host}:{meeting.port} within "
            f"{meeting.timeout_seconds:g} s: {str(e).splitlines()[0]}"
        ) from e
    return Wire(group, timeout_seconds=meeting.timeout_seconds, own=True, joins=False)


def _join_nccl(store: Store, meeting: Meeting, rank: int) -> Wire:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=meeting.timeout_seconds)
    group = dist.ProcessGroup(store, rank, meeting.size)
    backend = dist.ProcessGroupNCCL(store, rank, meeting.size, options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return Wire(group, timeout_seconds=meeting.timeout_seconds, own=True, joins=True)
