"""Digests of sampled weights on the trainer's side, for comparison with those in the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, WeightLayout, slices
from megarl.reshard.layout.sampled_boxes import SampledBox, find_parts
from megarl.reshard.transfer.bucket import digest, torch_dtype

PartDigests = list[dict[Box, bytes]]
"""By sample, the digest of each part that a trainer rank holds."""


@dataclass(frozen=True, slots=True)
class ExpectedBox:
    """A box of weights with the digest of its values in the trainer."""

    tp_rank: int
    tensor: str
    box: Box
    digest: bytes


def digest_samples(layout: WeightLayout, tensors: Mapping[str, Tensor], samples: Sequence[SampledBox]) -> PartDigests:
    """Return the digests of the samples' parts that this trainer rank holds, in the engines' dtype.

    Args:
        layout: the rank's layout.
        tensors: the rank's tensors under the names of its layout.
    """
    wanted = {sample.tensor for sample in samples}
    pieces = [piece for piece in layout.pieces if piece.tensor in wanted]
    return [
        {
            part: digest(tensors[local][slices(local_box)].to(torch_dtype(sample.dtype)))
            for part, local, local_box in find_parts(pieces, sample.box, sample.tensor)
        }
        for sample in samples
    ]


def merge_digests(samples: Sequence[SampledBox], by_rank: Sequence[PartDigests]) -> list[ExpectedBox]:
    """Return what the engines have to hold, from the digests of all trainer ranks.

    Raises:
        WeightSyncError: two trainer ranks hold the same box with different values, or no rank holds part of a sample.
    """
    expected: list[ExpectedBox] = []
    for number, sample in enumerate(samples):
        holders: dict[Box, int] = {}
        for rank, of_rank in enumerate(by_rank):
            for part, value in of_rank[number].items():
                first = holders.setdefault(part, rank)
                if by_rank[first][number][part] != value:
                    raise WeightSyncError(
                        f"trainer ranks {first} and {rank} hold different values of {sample.tensor} at {list(part)}"
                    )
                if first == rank:
                    expected.append(ExpectedBox(sample.tp_rank, sample.tensor, part, value))
        if not holders:
            raise WeightSyncError(f"no trainer rank holds {sample.tensor} at {list(sample.box)}")
    return expected
