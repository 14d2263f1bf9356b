"""Packed sequences for torch attention: groups of similar length, padded on the right.

A pack holds sequences one after another along one token axis (THD). Scaled-dot-product attention over the whole axis
would cost T^2; one call per sequence costs a Python call per sequence and layer. Instead, sequences are grouped by
length (powers of two), and each group attends as a right-padded causal batch, where padding is never attended to.

With context parallelism every sequence is cut into 2 * cp chunks; rank r holds the r-th and the r-th last (zigzag), so
that all ranks compute equally much attention. With cp = 2, a sequence of 8 tokens and one of 4:

    rank 0    0 1 . . . . 6 7 | 0 . . 3
    rank 1    . . 2 3 4 5 . . | . 1 2 .

Shapes: T tokens of the pack, t of this rank, n sequences of a group, L longest sequence of the group, Q = L / cp.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.megatron.modeling.router_replay import PackRoutes

ROPE_TABLE_STEP = 1024
"""Packs round the length of their longest sequence up to a multiple of this many tokens."""


@dataclass(frozen=True)
class LengthGroup:
    """Sequences that share one attention call."""

    query_index_nQ: Tensor
    """int64 [n, Q]: index of each query among this rank's tokens; padding repeats the sequence's last."""

    query_position_nQ: Tensor
    """int64 [n, Q]: position of each query within its sequence."""

    key_index_nL: Tensor
    """int64 [n, L]: index of each key among the pack's tokens; padding repeats the sequence's last."""

    padded_index_K: Tensor
    """int64 [K]: indices of this rank's K real (not padding) tokens into the flattened [n * Q]."""

    token_index_K: Tensor
    """int64 [K]: index of each of these tokens among this rank's tokens."""

    holds_full_sequences: bool
    """True if this rank holds the full sequences (cp = 1)."""

    def needs_no_mask(self, window: int) -> bool:
        """Return whether `is_causal=True` suffices: query i sees exactly keys 0 to i."""
        return self.holds_full_sequences and not 0 < window < self.key_index_nL.shape[1]

    def mask(self, window: int) -> Tensor:
        """Return the causal mask, bool [n, 1, Q, L]; a query sees at most `window` keys, itself included (0: all)."""
        key_L = torch.arange(self.key_index_nL.shape[1], device=self.key_index_nL.device)
        distance_nQL = self.query_position_nQ[:, :, None] - key_L
        seen_nQL = distance_nQL >= 0
        if window:
            seen_nQL &= distance_nQL < window
        return seen_nQL[:, None]


@dataclass
class TorchPackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's PackedSeqParams plus the indices of torch attention, computed once per pack."""

    groups: tuple[LengthGroup, ...] = ()
    """The sequences of the pack, grouped by length."""

    gathered_index_T: Tensor | None = None
    """int64 [T]: index of each token of the pack in the all-gathered tokens of the context-parallel ranks; None if
    cp = 1."""

    router_mask_Bt: Tensor | None = None
    """bool [B, t]: what routers know about this rank's tokens (`router.router_mask`); None without experts."""

    routes: PackRoutes | None = None
    """Routes of this rank's tokens, and where the first pass records them; None: routers choose in every pass."""


def local_index(cu_seqlens_S: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """Return the pack indices of the tokens of context-parallel rank `cp_rank`, in its order; int64 [t].

    Args:
        cu_seqlens_S: int32 [S + 1]; if `cp_size` > 1, every length must be a multiple of 2 * `cp_size`.
    """
    if cp_size == 1:
        return torch.arange(int(cu_seqlens_S[-1]))
    parts: list[Tensor] = []
    for start, end in pairwise(cu_seqlens_S.tolist()):
        chunk, left = divmod(end - start, 2 * cp_size)
        assert not left, f"cannot split a sequence of {end - start} tokens into 2 * {cp_size} equal chunks"
        own = (cp_rank, 2 * cp_size - 1 - cp_rank)
        parts += [torch.arange(start + which * chunk, start + (which + 1) * chunk) for which in own]
    return torch.cat(parts)


def describe_pack(
    cu_seqlens_S: Tensor,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    device: torch.device,
    for_torch: bool,
    router_mask_Bt: Tensor | None = None,
    routes: PackRoutes | None = None,
) -> TorchPackedSeqParams:
    """Build the attention parameters of a pack on `device`.

    Args:
        cu_seqlens_S: int32 [S + 1] of the full pack, on the CPU: reading it from a device would wait for the device.
        for_torch: include the indices of torch attention, which Transformer Engine has no use for.
    """
    bounds = cu_seqlens_S.tolist()
    longest = max(b - a for a, b in pairwise(bounds))
    # megatron-core caches a RoPE table for each of the last 32 values
    table_length = -(-longest // ROPE_TABLE_STEP) * ROPE_TABLE_STEP
    gathered_index_T = None
    if for_torch and cp_size > 1:
        gathered = torch.cat([local_index(cu_seqlens_S, rank, cp_size) for rank in range(cp_size)])
        gathered_index_T = gathered.argsort().to(device)
    on_device_S = cu_seqlens_S.to(device)
    return TorchPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device_S,
        cu_seqlens_kv=on_device_S,
        max_seqlen_q=table_length,
        max_seqlen_kv=table_length,
        groups=_group_by_length(bounds, cp_rank, cp_size, device) if for_torch else (),
        gathered_index_T=gathered_index_T,
        router_mask_Bt=None if router_mask_Bt is None else router_mask_Bt.to(device),
        routes=routes,
    )


def _group_by_length(bounds: list[int], cp_rank: int, cp_size: int, device: torch.device) -> tuple[LengthGroup, ...]:
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(bounds):
        by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    return tuple(_group(sequences, cp_rank, cp_size, device) for sequences in by_size.values())


def _group(sequences: list[tuple[int, int]], cp_rank: int, cp_size: int, device: torch.device) -> LengthGroup:
    starts_n = torch.tensor([s for s, _ in sequences])
    lengths_n = torch.tensor([e - s for s, e in sequences])
    key_L = torch.arange(int(lengths_n.max()))
    shares_n = lengths_n // cp_size
    query_Q = torch.arange(int(shares_n.max()))
    real_nQ = query_Q < shares_n[:, None]
    share_nQ = torch.minimum(query_Q, shares_n[:, None] - 1)
    query_index_nQ = starts_n[:, None] // cp_size + share_nQ
    padded_index_K = real_nQ.flatten().nonzero()[:, 0]
    return LengthGroup(
        query_index_nQ=query_index_nQ.to(device),
        query_position_nQ=_positions(share_nQ, shares_n, cp_rank, cp_size).to(device),
        key_index_nL=(starts_n[:, None] + torch.minimum(key_L, lengths_n[:, None] - 1)).to(device),
        padded_index_K=padded_index_K.to(device),
        token_index_K=query_index_nQ.flatten()[padded_index_K].to(device),
        holds_full_sequences=cp_size == 1,
    )


def _positions(share_nQ: Tensor, shares_n: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """Return positions within the sequence, [n, Q], from positions within this rank's share of it."""
    if cp_size == 1:
        return share_nQ
    chunks_n1 = shares_n[:, None] // 2
    which = torch.where(share_nQ < chunks_n1, cp_rank, 2 * cp_size - 1 - cp_rank)
    return which * chunks_n1 + share_nQ % chunks_n1
