"""What each token or completion gained over its baseline.

Shapes: N completions, T packed tokens, S sequences of the pack, K tokens of the pack that count, [C, R] the same in
chunks (see `recurrence`), E ends of sequences. Where N meets a pack, its sequence n is completion n; what follows the
N-th is padding. Tokens outside the mask, such as a tool's answer between two turns, are passed over: neither their
rewards nor their values count, and their advantage is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.functional.recurrence import in_columns, place_in_columns, solve_backwards_

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as DeepSeekMath's GRPO does."""

WHITEN_EPSILON = 1e-8
"""Added to the standard deviation of all tokens, as REINFORCE++ does."""

SLAB = 262_144
"""Tokens that are worked on at once, where a sequence is not longer: enough for few steps, few enough for a cache."""

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
    """[T] generalised advantages and [T] returns (arXiv 1506.02438, equations 11 to 16), both 0 outside the mask.

    delta_t = R_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, return = A + V, where "next" is the sequence's
    next token inside the mask; behind its last one V and A are 0. Computed in float64, given back as `values_T` is.

    Args:
        lam: one for all, or [S] one per sequence, as `length_adaptive_lambda` makes them.
    """
    advantages_T, returns_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    factor = gamma * (lam.double() if isinstance(lam, Tensor) else lam)
    for kept in _slabs(mask_T, cu_seqlens_S):
        values_CR, delta_CR = kept.take(values_T), kept.take(rewards_T)
        last_E = delta_CR.view(-1)[kept.ends_E]
        delta_CR[:-1].add_(values_CR[1:], alpha=gamma)
        delta_CR[-1, :-1].add_(values_CR[0, 1:], alpha=gamma)
        delta_CR.view(-1)[kept.ends_E] = last_E
        advantages_CR = solve_backwards_(delta_CR.sub_(values_CR), kept.factors(factor))
        kept.put(advantages_CR, into=advantages_T)
        kept.put(values_CR.add_(advantages_CR), into=returns_T)
    return advantages_T, returns_T


@torch.no_grad()
def discounted_returns(rewards_T: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor, *, gamma: float) -> Tensor:
    """[T] G_t = R_t + gamma G_next, "next" as in `gae`; 0 outside the mask."""
    returns_T = torch.zeros_like(rewards_T)
    for kept in _slabs(mask_T, cu_seqlens_S):
        kept.put(solve_backwards_(kept.take(rewards_T), kept.factors(gamma)), into=returns_T)
    return returns_T


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """[T] (value - mean) / (std + 1e-8) over all tokens inside the mask, 0 outside.

    The standard deviation divides by n, not n - 1, as REINFORCE++'s does in OpenRLHF: one token alone becomes 0.
    """
    values_K = values_T[mask_T].double()
    whitened_T = torch.zeros_like(values_T)
    if len(values_K):
        centred_K = values_K - values_K.mean()
        whitened_T[mask_T] = (centred_K / (centred_K.square().mean().sqrt() + WHITEN_EPSILON)).to(values_T.dtype)
    return whitened_T


def reinforce_pp_advantages(rewards_T: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor, *, gamma: float) -> Tensor:
    """[T] discounted returns, whitened over the whole batch (REINFORCE++, arXiv 2501.03262)."""
    return whiten(discounted_returns(rewards_T, mask_T, cu_seqlens_S, gamma=gamma), mask_T)


def reinforce_pp_baseline_advantages(
    rewards_N: Tensor, group_ids_N: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor
) -> Tensor:
    """[T] R - mean of its group on all tokens, whitened over the whole batch (REINFORCE++-baseline, arXiv 2501.03262).

    Raises:
        ValueError: a group has fewer than two members.
    """
    centred_N = group_advantages(rewards_N, group_ids_N, kind="dr_grpo")
    return whiten(spread_completions(centred_N, mask_T, cu_seqlens_S), mask_T)


def remax_advantages(rewards_T: Tensor, baseline_S: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """[T] rewards yet to come less the greedy completion's, 0 outside the mask (ReMax, arXiv 2310.10505, algorithm 1).

    Args:
        baseline_S: reward of the greedy completion of each sequence's prompt; [N] will do where padding follows.
    """
    returns_T = discounted_returns(rewards_T, mask_T, cu_seqlens_S, gamma=1.0)
    return returns_T - spread_completions(baseline_S.to(returns_T.dtype), mask_T, cu_seqlens_S)


def length_adaptive_lambda(lengths_N: Tensor, *, alpha: float) -> Tensor:
    """float32 [N] 1 - 1 / max(alpha * length, 1) (VAPO, arXiv 2504.05118, section 4.2), lengths in sampled tokens."""
    return (1 - 1 / (alpha * lengths_N.double()).clamp(min=1)).float()


def group_advantages(rewards_N: Tensor, group_ids_N: Tensor, *, kind: GroupBaseline) -> Tensor:
    """[N] advantages from scalar rewards, the group's own rewards being the baseline.

    `grpo`: (R - mean) / (std + 1e-6), std with n - 1 (arXiv 2402.03300, section 4.1.2).
    `dr_grpo`: R - mean (arXiv 2503.20783, section 3.2).
    `rloo`: R_i - mean of the others (arXiv 2402.14740, equation 5).

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
class _Kept:
    """The tokens that count of some sequences that follow each other, laid out as `recurrence` has it.

    What fills up the last chunk is the last token again and again, each as if alone in a sequence: it gets the same.
    """

    sequences: slice
    """Which ones."""
    index_CR: Tensor
    """Where the tokens are in the pack."""
    count_S: Tensor
    """How many of them each sequence has."""
    ends_E: Tensor
    """Where in the flattened [C, R] a sequence ends."""

    def take(self, values_T: Tensor) -> Tensor:
        """float64 [C, R] a copy of theirs."""
        return values_T.index_select(0, self.index_CR.view(-1)).to(torch.double).view_as(self.index_CR)

    def factors(self, factor: float | Tensor) -> Tensor:
        """float64 [C, R] the factor (one, or float64 [S]) of the next token's result: 0 where a sequence ends."""
        if isinstance(factor, Tensor):
            factors_CR = in_columns(factor[self.sequences].repeat_interleave(self.count_S))
        else:
            factors_CR = torch.full_like(self.index_CR, factor, dtype=torch.double)
        factors_CR.view(-1)[self.ends_E] = 0
        return factors_CR

    def put(self, values_CR: Tensor, *, into: Tensor) -> None:
        """Where they belong in a pack."""
        into.scatter_(0, self.index_CR.view(-1), values_CR.to(into.dtype).view(-1))


def _slabs(mask_T: Tensor, cu_seqlens_S: Tensor) -> Iterator[_Kept]:
    """What counts of whole sequences, about `SLAB` tokens at a time."""
    total, count = len(mask_T), len(cu_seqlens_S) - 1
    limits = torch.arange(SLAB, total + SLAB, SLAB, dtype=cu_seqlens_S.dtype, device=cu_seqlens_S.device)
    cuts = sorted({0, *torch.searchsorted(cu_seqlens_S, limits).clamp(max=count).tolist()})
    for first, last in pairwise(cuts):
        bounds_S = cu_seqlens_S[first : last + 1].long()
        start, end = int(bounds_S[0]), int(bounds_S[-1])
        # several times as fast as Tensor.nonzero
        index_K = torch.from_numpy(np.flatnonzero(mask_T[start:end].numpy(force=True))).to(mask_T.device).add_(start)
        if len(index_K):
            index_CR = in_columns(index_K)
            end_S = torch.searchsorted(index_K, bounds_S)
            count_S = end_S.diff()
            fill = torch.arange(len(index_K), index_CR.numel(), device=index_K.device)
            ends_E = torch.cat((end_S[1:][count_S > 0] - 1, fill))
            yield _Kept(slice(first, last), index_CR, count_S, place_in_columns(ends_E, len(index_K)))


def spread_completions(values_N: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """[T] each completion's value on its tokens inside the mask, 0 elsewhere."""
    lengths_N = cu_seqlens_S.diff()[: len(values_N)]
    spread_T = torch.zeros(len(mask_T), dtype=values_N.dtype, device=values_N.device)
    owned = values_N.repeat_interleave(lengths_N)
    assert not mask_T[len(owned) :].any(), f"{len(values_N)} completions, and tokens that count behind the last"
    spread_T[: len(owned)] = owned
    return torch.where(mask_T, spread_T, torch.zeros_like(spread_T))
