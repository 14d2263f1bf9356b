"""Advantages and returns of tokens and completions.

Shapes: N completions, T packed tokens, S sequences of the pack, K tokens of the pack inside the mask, [C, R] the same
tokens in chunks (see `recurrence`), E sequence ends. If a function takes N values and a pack, sequence n of the pack is
completion n, and the sequences after the N-th are padding. Tokens outside the mask, such as tool output between two
turns, are skipped: their rewards and values do not count, and their advantage is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.functional.moments import GroupMoments
from megarl.functional.recurrence import Columns, solve_backwards_

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group, as in GRPO (DeepSeekMath)."""

WHITEN_EPSILON = 1e-8
"""Added to the standard deviation of all tokens, as in REINFORCE++."""

BLOCK_TOKENS = 262_144
"""Tokens processed at once, unless a sequence is longer: few enough to fit a cache, enough to keep the loop short."""

GroupBaseline = Literal["grpo", "dr_grpo", "rloo"]


@torch.no_grad()
def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens_S: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """[T] generalized advantages and [T] returns (GAE, arXiv 1506.02438, equations 11 to 16), both 0 outside the mask.

    delta_t = R_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, return = A + V, where "next" is the sequence's
    next token inside the mask; after its last one V and A are 0. Computed in float64, returned in the dtype of
    `values_T`.

    Examples:
        >>> advantages_T, returns_T = gae(
        ...     torch.tensor([0.0, 0.0, 1.0]),  # the reward is at the last token
        ...     torch.tensor([0.0, 0.5, 0.5]),
        ...     torch.tensor([False, True, True]),  # the first token is the prompt
        ...     torch.tensor([0, 3]),
        ...     gamma=1.0,
        ...     lam=1.0,
        ... )
        >>> advantages_T.tolist(), returns_T.tolist()
        ([0.0, 0.5, 0.5], [0.0, 1.0, 1.0])

    Args:
        lam: one lambda for all sequences, or [S] one per sequence, as from `length_adaptive_lambda`.
    """
    advantages_T, returns_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    factor = gamma * (lam.double() if isinstance(lam, Tensor) else lam)
    for tokens in _blocks(mask_T, cu_seqlens_S):
        values_CR, delta_CR = tokens.gather(values_T), tokens.gather(rewards_T)
        delta_CR.add_(tokens.next_values(values_CR).mul_(gamma)).sub_(values_CR)
        advantages_CR = solve_backwards_(delta_CR, tokens.factors(factor))
        tokens.scatter(advantages_CR, into=advantages_T)
        tokens.scatter(values_CR.add_(advantages_CR), into=returns_T)
    return advantages_T, returns_T


@torch.no_grad()
def discounted_returns(rewards_T: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor, *, gamma: float) -> Tensor:
    """[T] discounted returns G_t = R_t + gamma G_next, with "next" as in `gae`; 0 outside the mask.

    Examples:
        >>> mask_T, cu_seqlens_S = torch.tensor([False, True, True]), torch.tensor([0, 3])
        >>> discounted_returns(torch.tensor([0.0, 0.0, 1.0]), mask_T, cu_seqlens_S, gamma=0.5).tolist()
        [0.0, 0.5, 1.0]
    """
    returns_T = torch.zeros_like(rewards_T)
    for tokens in _blocks(mask_T, cu_seqlens_S):
        tokens.scatter(solve_backwards_(tokens.gather(rewards_T), tokens.factors(gamma)), into=returns_T)
    return returns_T


def whiten(values_T: Tensor, mask_T: Tensor, *, unbiased: bool = False) -> Tensor:
    """[T] whitened values (value - mean) / (std + 1e-8) over all tokens inside the mask, 0 outside.

    A single token becomes 0.

    Examples:
        >>> whiten(torch.tensor([9.0, 1.0, 3.0]), torch.tensor([False, True, True])).tolist()
        [0.0, -1.0, 1.0]

    Args:
        unbiased: the variance divides by n - 1, as in verl and slime; else by n, as in REINFORCE++ of OpenRLHF.
    """
    values_K = values_T[mask_T].cpu()
    moments = GroupMoments.of(values_K, torch.zeros(len(values_K), dtype=torch.long), 1)
    return normalize(values_T, mask_T, mean=moments.mean, variance=moments.variance(unbiased=unbiased))


def normalize(values_T: Tensor, mask_T: Tensor, *, mean: float, variance: float) -> Tensor:
    """[T] values as by `whiten`, given the mean and the variance, which may be those of other tokens too.

    Examples:
        >>> normalize(torch.tensor([9.0, 1.0, 3.0]), torch.tensor([False, True, True]), mean=1.0, variance=4.0).tolist()
        [0.0, 0.0, 1.0]
    """
    whitened_T = ((values_T.double() - mean) / (variance**0.5 + WHITEN_EPSILON)).to(values_T.dtype)
    return torch.where(mask_T, whitened_T, torch.zeros_like(whitened_T))


def remax_advantages(rewards_T: Tensor, baseline_S: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """[T] return minus the greedy completion's reward, 0 outside the mask (ReMax, arXiv 2310.10505, algorithm 1).

    Examples:
        >>> mask_T, cu_seqlens_S = torch.tensor([False, True, True]), torch.tensor([0, 3])
        >>> remax_advantages(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.25]), mask_T, cu_seqlens_S).tolist()
        [0.0, 0.75, 0.75]

    Args:
        baseline_S: reward of the greedy completion of each sequence's prompt; [N] if padding sequences follow.
    """
    returns_T = discounted_returns(rewards_T, mask_T, cu_seqlens_S, gamma=1.0)
    return returns_T - spread_completions(baseline_S.to(returns_T.dtype), mask_T, cu_seqlens_S)


def length_adaptive_lambda(lengths_N: Tensor, *, alpha: float) -> Tensor:
    """float32 [N] lambda = 1 - 1 / max(alpha * length, 1), length in sampled tokens (VAPO, arXiv 2504.05118, 4.2).

    Examples:
        >>> length_adaptive_lambda(torch.tensor([4, 40]), alpha=0.5).tolist()
        [0.5, 0.949999988079071]
    """
    return (1 - 1 / (alpha * lengths_N.double()).clamp(min=1)).float()


def group_advantages(rewards_N: Tensor, group_ids_N: Tensor, *, kind: GroupBaseline) -> Tensor:
    """[N] advantages from scalar rewards, with a baseline from the rewards of the same group.

    `grpo`: (R - mean) / (std + 1e-6), std with n - 1 (arXiv 2402.03300, section 4.1.2).
    `dr_grpo`: R - mean (arXiv 2503.20783, section 3.2).
    `rloo`: R_i - mean of the others (arXiv 2402.14740, equation 5).

    Examples:
        >>> rewards_N, group_ids_N = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
        >>> group_advantages(rewards_N, group_ids_N, kind="dr_grpo").tolist()
        [0.5, -0.5, 0.0, 0.0]
        >>> group_advantages(rewards_N, group_ids_N, kind="rloo").tolist()
        [1.0, -1.0, 0.0, 0.0]

    Raises:
        ValueError: a group has fewer than two members.
    """
    _, group_N = torch.unique(group_ids_N, return_inverse=True)
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    rewards_N = rewards_N.double()
    count_G = torch.zeros(num_groups, dtype=torch.double).index_add_(0, group_N, torch.ones_like(rewards_N))
    if bool((count_G < 2).any()):
        raise ValueError(f"a group baseline needs at least 2 completions per group, got {int(count_G.min())}")
    mean_G = torch.zeros(num_groups, dtype=torch.double).index_add_(0, group_N, rewards_N) / count_G
    centred_N = rewards_N - mean_G[group_N]
    match kind:
        case "dr_grpo":
            advantages_N = centred_N
        case "rloo":
            advantages_N = centred_N * (count_G / (count_G - 1))[group_N]
        case "grpo":
            variance_G = torch.zeros_like(mean_G).index_add_(0, group_N, centred_N**2) / (count_G - 1)
            advantages_N = centred_N / (variance_G.sqrt() + STD_EPSILON)[group_N]
    return advantages_N.float()


@dataclass(frozen=True, slots=True)
class _MaskedTokens:
    """Tokens inside the mask of some consecutive sequences, laid out in columns as in `recurrence`."""

    sequences: slice
    """The range of sequences in the pack."""
    index_CR: Tensor
    """Index of each token in the pack; padding has that of the last token, and gets the same result."""
    columns: Columns

    def gather(self, values_T: Tensor) -> Tensor:
        """float64 [C, R] copy of the values of these tokens."""
        return values_T.index_select(0, self.index_CR.view(-1)).to(torch.double).view_as(self.index_CR)

    def next_values(self, values_CR: Tensor) -> Tensor:
        """float64 [C, R] value of each token's next token in its sequence; 0 after the last one."""
        next_CR = torch.empty_like(values_CR)
        next_CR[:-1] = values_CR[1:]
        next_CR[-1, :-1] = values_CR[0, 1:]
        return next_CR.masked_fill_(self.columns.is_end_CR, 0)

    def factors(self, factor: float | Tensor) -> Tensor:
        """float64 [C, R] factor of the next token's result, from a scalar or float64 [S]; 0 at sequence ends."""
        if isinstance(factor, Tensor):
            factors_CR = factor[self.sequences][self.columns.sequence_R].expand(self.index_CR.shape).contiguous()
        else:
            factors_CR = torch.full_like(self.index_CR, factor, dtype=torch.double)
        return factors_CR.masked_fill_(self.columns.is_end_CR, 0)

    def scatter(self, values_CR: Tensor, *, into: Tensor) -> None:
        """Write [C, R] values to the positions of these tokens in a pack."""
        into.scatter_(0, self.index_CR.view(-1), values_CR.to(into.dtype).view(-1))


def _blocks(mask_T: Tensor, cu_seqlens_S: Tensor) -> Iterator[_MaskedTokens]:
    """Yield the tokens inside the mask in blocks of complete sequences, about `BLOCK_TOKENS` tokens each."""
    total, count = len(mask_T), len(cu_seqlens_S) - 1
    limits = torch.arange(
        BLOCK_TOKENS, total + BLOCK_TOKENS, BLOCK_TOKENS, dtype=cu_seqlens_S.dtype, device=cu_seqlens_S.device
    )
    block_bounds = sorted({0, *torch.searchsorted(cu_seqlens_S, limits).clamp(max=count).tolist()})
    for first, last in pairwise(block_bounds):
        bounds_S = cu_seqlens_S[first : last + 1].long()
        start, end = int(bounds_S[0]), int(bounds_S[-1])
        # several times faster than Tensor.nonzero
        index_K = torch.from_numpy(np.flatnonzero(mask_T[start:end].numpy(force=True))).to(mask_T.device).add_(start)
        if len(index_K):
            columns = Columns.of(torch.searchsorted(index_K, bounds_S).diff())
            yield _MaskedTokens(slice(first, last), index_K[columns.index_CR], columns)


def spread_completions(values_N: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """[T] value of the completion on each of its tokens inside the mask, 0 elsewhere.

    Examples:
        >>> mask_T, cu_seqlens_S = torch.tensor([False, True, False, True]), torch.tensor([0, 2, 4])
        >>> spread_completions(torch.tensor([1.0, 2.0]), mask_T, cu_seqlens_S).tolist()
        [0.0, 1.0, 0.0, 2.0]
    """
    lengths_N = cu_seqlens_S.diff()[: len(values_N)]
    spread_T = torch.zeros(len(mask_T), dtype=values_N.dtype, device=values_N.device)
    values_of_tokens = values_N.repeat_interleave(lengths_N)
    assert not mask_T[len(values_of_tokens) :].any(), (
        f"{len(values_N)} completions, but the mask has tokens after the last one"
    )
    spread_T[: len(values_of_tokens)] = values_of_tokens
    return torch.where(mask_T, spread_T, torch.zeros_like(spread_T))
