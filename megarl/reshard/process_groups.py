"""Process groups over some of the ranks, made by all of them together."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


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
    """End a group of `make_group`."""
    if group is not None:
        dist.destroy_process_group(group)
