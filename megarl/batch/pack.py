"""Trajectories -> one packed micro-batch. Shapes: T packed tokens, S sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.batch.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Trajectories concatenated along one token axis.

    Position t carries token t as input, and everything else of the token it predicts, t + 1: `target_ids_T[t]` is
    `token_ids_T[t + 1]`, `mask_T[t]` says whether the policy sampled that one, and so on. The last position of a
    sequence predicts nothing and is masked.
    """

    token_ids_T: Tensor
    """int64 [T]."""
    position_ids_T: Tensor
    """int64 [T], from 0 in each sequence."""
    target_ids_T: Tensor
    """int64 [T]."""
    mask_T: Tensor
    """bool [T]."""
    advantages_T: Tensor
    """float32 [T]."""
    rollout_logprobs_T: Tensor
    """float32 [T], as the engine sampled them."""
    cu_seqlens_S: Tensor
    """int32 [S + 1]; sequence s owns `cu_seqlens_S[s]:cu_seqlens_S[s + 1]`. Padding is a last, masked sequence."""


def pack(trajectories: Sequence[Trajectory], advantages: Sequence[float], *, multiple: int = 1) -> PackedBatch:
    """Concatenate, each trajectory's advantage on all its sampled tokens; T is padded to a multiple of `multiple`.

    No trajectories at all give one masked sequence of padding: ranks run the same number of micro-batches.
    """
    total = sum(t.num_tokens for t in trajectories)
    padding = multiple - total if total == 0 else -total % multiple
    lengths = [t.num_tokens for t in trajectories] + ([padding] if padding else [])
    for trajectory in trajectories:
        assert not trajectory.loss_mask[0], f"{trajectory.prompt_id}: a sampled token needs a token before it"
    advantage_arrays = [np.full(t.num_tokens, a, np.float32) for t, a in zip(trajectories, advantages, strict=True)]
    token_ids = _concatenate([t.token_ids for t in trajectories], np.int64, padding)
    return PackedBatch(
        token_ids_T=token_ids,
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        # First tokens are never sampled, so what rolls in from the next sequence is always masked.
        target_ids_T=token_ids.roll(-1),
        mask_T=_concatenate([t.loss_mask for t in trajectories], np.bool_, padding).roll(-1),
        advantages_T=_concatenate(advantage_arrays, np.float32, padding).roll(-1),
        rollout_logprobs_T=_concatenate([t.logprobs for t in trajectories], np.float32, padding).roll(-1),
        cu_seqlens_S=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
    )


def _concatenate(arrays: Sequence[np.ndarray], dtype: type, padding: int) -> Tensor:
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(padding, dtype)]).astype(dtype))
