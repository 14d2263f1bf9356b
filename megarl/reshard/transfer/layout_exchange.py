"""Exchange of the trainer ranks' layouts: each rank sends what it holds once, as a compressed table of boxes.

    rank r      digest of the model's tensors | boxes, as indices into these tensors      about 1 kB, no names
    all ranks   by rank, its layout; equal tables become one object, and are decoded when they are first used

All ranks have the model's tensors themselves, and no rank needs the names of another rank's local tensors. What is sent
is what the ranks really hold, so it also holds for model families outside of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.piece_table import PieceTable

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

    Args:
        layout: the layout that this rank holds.
        all_gather: sends bytes of any length to all ranks and returns those of all ranks, by rank.

    Raises:
        WeightSyncError: the ranks hold different models; names the ranks. Raised on all ranks.
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
