"""How torch attention sees a pack: sequences of similar length side by side, padded on the right.

A pack holds sequences one after another along one token axis (THD). Scaled-dot-product attention over the whole axis
would cost T^2; one call per sequence costs a Python call per sequence and layer. Instead, sequences are grouped by
length (powers of two), and each group attends as a right-padded causal batch, where padding is never attended to.

Shapes: T packed tokens, n sequences of a group, L the group's longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class LengthGroup:
    """Sequences that attend in one call."""

    gather_nL: Tensor
    """int64 [n, L]: which packed token stands at (sequence, position); padding repeats the last token."""

    padded_index_K: Tensor
    """int64 [K]: the K real tokens as indices into the flattened [n * L]."""

    token_index_K: Tensor
    """int64 [K]: where each real token lies in the pack."""


@dataclass
class TorchPackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's description of a pack, with what torch attention needs of it computed once per pack."""

    groups: tuple[LengthGroup, ...] = ()


def describe_pack(cu_seqlens_S: Tensor) -> TorchPackedSeqParams:
    """For `cu_seqlens_S` int32 [S + 1], on the CPU or the rank's device."""
    bounds = cu_seqlens_S.tolist()
    longest = max(b - a for a, b in pairwise(bounds))
    return TorchPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_S,
        cu_seqlens_kv=cu_seqlens_S,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        groups=_group_by_length(bounds, cu_seqlens_S.device),
    )


def _group_by_length(bounds: list[int], device: torch.device) -> tuple[LengthGroup, ...]:
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(bounds):
        by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    groups = []
    for sequences in by_size.values():
        starts_n = torch.tensor([s for s, _ in sequences])
        lengths_n = torch.tensor([e - s for s, e in sequences])
        longest = int(lengths_n.max())
        position_L = torch.arange(longest)
        real_nL = position_L[None] < lengths_n[:, None]
        gather_nL = starts_n[:, None] + torch.minimum(position_L[None], lengths_n[:, None] - 1)
        padded_index_K = real_nL.flatten().nonzero()[:, 0]
        groups.append(
            LengthGroup(gather_nL.to(device), padded_index_K.to(device), gather_nL.flatten()[padded_index_K].to(device))
        )
    return tuple(groups)
