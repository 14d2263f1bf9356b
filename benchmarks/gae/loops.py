"""Generalized advantage estimation as loops, for comparison.

Shapes: T packed tokens; S sequences of at most L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gae_over_tensors(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens_S: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `megarl.functional.gae` one tensor element at a time, following the formula."""
    advantages_T, returns_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    _write_gae(advantages_T, returns_T, (rewards_T, values_T, mask_T), cu_seqlens_S.tolist(), gamma, _to_list(lam))
    return advantages_T, returns_T


def gae_over_lists(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens_S: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `megarl.functional.gae` on Python numbers, converted from and to tensors; far faster."""
    lists = tuple(x.tolist() for x in (rewards_T, values_T, mask_T))
    advantages, returns = [0.0] * len(values_T), [0.0] * len(values_T)
    _write_gae(advantages, returns, lists, cu_seqlens_S.tolist(), gamma, _to_list(lam))
    return torch.tensor(advantages, dtype=values_T.dtype), torch.tensor(returns, dtype=values_T.dtype)


def _to_list(lam: float | Tensor) -> float | list[float]:
    return lam.tolist() if isinstance(lam, Tensor) else lam


def _write_gae(
    advantages: Any, returns: Any, tokens: tuple[Any, ...], bounds: list[int], gamma: float, lam: float | list[float]
) -> None:
    """Write advantages and returns in place; arguments are tensors or lists."""
    rewards, values, mask = tokens
    for s in range(len(bounds) - 1):
        decay = gamma * (lam if isinstance(lam, float) else lam[s])
        next_value = advantage = 0.0
        for t in range(bounds[s + 1] - 1, bounds[s] - 1, -1):
            if mask[t]:
                value = values[t]
                advantage = rewards[t] + gamma * next_value - value + decay * advantage
                next_value = value
                advantages[t] = advantage
                returns[t] = advantage + value


def pad(values_T: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """Return [S, L] values, with zeros after the end of each sequence."""
    sequences = values_T.tensor_split(cu_seqlens_S[1:-1].tolist())
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)


def unpad(values_SL: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """Return the packed values [T]."""
    lengths_S = cu_seqlens_S.diff()
    return values_SL[torch.arange(values_SL.shape[1]) < lengths_S[:, None]]


def gae_over_positions(
    rewards_SL: Tensor, values_SL: Tensor, mask_SL: Tensor, *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [S, L] of a padded batch, one position of all sequences at a time."""
    advantages_SL = torch.zeros_like(values_SL)
    next_value_S = advantage_S = values_SL.new_zeros(len(values_SL))
    for position in reversed(range(values_SL.shape[1])):
        mask_S, value_S = mask_SL[:, position], values_SL[:, position]
        here_S = rewards_SL[:, position] + gamma * next_value_S - value_S + gamma * lam * advantage_S
        advantage_S = torch.where(mask_S, here_S, advantage_S)
        next_value_S = torch.where(mask_S, value_S, next_value_S)
        advantages_SL[:, position] = torch.where(mask_S, here_S, 0.0)
    return advantages_SL, torch.where(mask_SL, advantages_SL + values_SL, 0.0)
