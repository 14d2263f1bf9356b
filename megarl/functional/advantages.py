"""Advantages and returns of tokens, turns and completions.

Shapes: N completions, T packed tokens, S sequences of the pack, K tokens of the pack inside the mask, [C, R] the same
tokens in chunks (see `solve_backwards_`), E sequence ends; M turns of all episodes, ordered by episode.

If a function takes N values and a pack, sequence n of the pack is completion n, and the sequences after the N-th are
padding. Tokens outside the mask, such as tool output between two turns, are skipped: their rewards and values do not
count, and their advantage is 0. A turn is a run of sampled tokens. Turn m is number k of its episode, counted from 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    """Tokens inside the mask of some consecutive sequences, laid out in columns as in `solve_backwards_`."""

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


def turn_of_tokens(mask_T: Tensor) -> Tensor:
    """int64 [T] index of the turn of each token inside the mask, -1 outside.

    A token inside the mask begins a turn unless the token before it is inside, too. The first token of a sequence is
    never inside.

    Examples:
        >>> turn_of_tokens(torch.tensor([False, True, True, False, True])).tolist()
        [-1, 0, 0, -1, 1]
    """
    starts_T = mask_T.clone()
    starts_T[1:] &= ~mask_T[:-1]
    return torch.where(mask_T, starts_T.long().cumsum(0) - 1, -1)


def turn_returns(rewards_M: Tensor, episode_M: Tensor) -> Tensor:
    """float64 [M] reward-to-go: the reward of this turn and of all later turns of the episode.

    Examples:
        >>> turn_returns(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1])).tolist()
        [3.0, 2.0, 4.0]

    Args:
        episode_M: index of the episode of each turn, ascending.
    """
    returns_M, number_M = rewards_M.double().clone(), _number_in_episode(episode_M)
    followed_M = torch.cat([episode_M[1:] == episode_M[:-1], torch.zeros(min(1, len(episode_M)), dtype=torch.bool)])
    for number in reversed(range(int(number_M.max()) if len(number_M) else 0)):  # sums of an episode's own rewards only
        turns = ((number_M == number) & followed_M).nonzero()[:, 0]
        returns_M[turns] += returns_M[turns + 1]
    return returns_M


def turn_advantages(rewards_M: Tensor, episode_M: Tensor, group_ids_N: Tensor, *, kind: GroupBaseline) -> Tensor:
    """float32 [M] advantages of turns, with a baseline from the same turn of the group's other episodes.

    With the reward-to-go G_ik of turn k of episode i, as `turn_returns`, the set E_k of the group's episodes that have
    a turn k, and k' the smaller of k and the last turn that at least two episodes of the group have:

    `grpo`: (G_ik - mean of G_jk' over j in E_k') / (std of G_jk' + 1e-6), std with n - 1.
    `dr_grpo`: G_ik - mean of G_jk' over j in E_k'.
    `rloo`: G_ik - mean of G_jk' over the other j in E_k'.

    With one turn per episode this is `group_advantages`. The turns of a group are 0 if only one of its episodes has
    any.

    Examples:
        >>> rewards_M, episode_M = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 0, 1])  # two turns, and one
        >>> turn_advantages(rewards_M, episode_M, torch.tensor([0, 0]), kind="rloo").tolist()
        [1.0, 1.0, -1.0]
    """
    returns_M, number_M = turn_returns(rewards_M, episode_M), _number_in_episode(episode_M)
    _, group_N = torch.unique(group_ids_N, return_inverse=True)
    group_M = group_N[episode_M]
    width = int(number_M.max()) + 1 if len(number_M) else 1
    cells = (int(group_N.max()) + 1 if len(group_N) else 0) * width
    cell_M = group_M * width + number_M
    count_C = torch.bincount(cell_M, minlength=cells).double()
    mean_C = torch.zeros(cells, dtype=torch.double).index_add_(0, cell_M, returns_M) / count_C.clamp(min=1)
    squares_C = torch.zeros(cells, dtype=torch.double).index_add_(0, cell_M, (returns_M - mean_C[cell_M]) ** 2)
    last_G = (count_C.view(-1, width) >= 2).sum(dim=1) - 1  # counts do not rise with the turn
    known_M = last_G[group_M] >= 0
    compared_M = torch.minimum(number_M, last_G[group_M].clamp(min=0))
    baseline_M = group_M * width + compared_M
    centred_M = returns_M - mean_C[baseline_M]
    if kind == "rloo":
        own_M = returns_M[torch.arange(len(number_M)) - number_M + compared_M]  # the episode's own return there
        others_M = count_C[baseline_M] - 1
        mean_M = (mean_C[baseline_M] * count_C[baseline_M] - own_M) / others_M.clamp(min=1)
        centred_M = returns_M - mean_M
    elif kind == "grpo":
        variance_C = squares_C / (count_C - 1).clamp(min=1)
        centred_M = centred_M / (variance_C.sqrt() + STD_EPSILON)[baseline_M]
    return torch.where(known_M, centred_M, 0.0).float()


def _number_in_episode(episode_M: Tensor) -> Tensor:
    """Return the index of each turn within its episode, int64 [M]."""
    first_M = torch.searchsorted(episode_M.contiguous(), episode_M)
    return torch.arange(len(episode_M)) - first_M


def safe_rlhf_advantages(reward_adv_T: Tensor, cost_adv_T: Tensor, *, multiplier: float) -> Tensor:
    """[T] combined advantages (A_R - lambda A_C) / (1 + lambda) of PPO-Lagrangian; lambda is the multiplier.

    Examples:
        >>> safe_rlhf_advantages(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), multiplier=1.0).tolist()
        [0.25, -0.75]
    """
    return (reward_adv_T - multiplier * cost_adv_T) / (1 + multiplier)


@dataclass(slots=True)
class LagrangeMultiplier:
    """Weight of the cost against the reward; it grows while the mean cost is above the limit.

    Gradient ascent on log(value) as in the paper, but without the factor `value` of its gradient: the step in
    log(value) does not depend on the value.

    Examples:
        >>> round(LagrangeMultiplier().update(mean_cost=0.5), 4)
        1.0513
    """

    value: float = 1.0
    """Current multiplier, positive: the only field that `update` changes."""

    lr: float = 0.1
    """Learning rate of log(value)."""

    maximum: float = 5.0

    limit: float = 0.0
    """Upper bound of the mean cost."""

    def __post_init__(self) -> None:
        if not 0 < self.value <= self.maximum:
            raise ValueError(f"LagrangeMultiplier needs a value above 0 and at most {self.maximum}, got {self.value}")

    def update(self, mean_cost: float) -> float:
        """Add lr * (mean_cost - limit) to log(value), clamp the value to `maximum`, and return it."""
        log_value = math.log(self.value) + self.lr * (mean_cost - self.limit)
        # In log space a product cannot overflow. Keep the value above 0: from 0 it could never grow again.
        value = math.exp(min(log_value, math.log(self.maximum)))
        self.value = min(max(value, sys.float_info.min), self.maximum)
        return self.value


@dataclass(frozen=True, slots=True)
class GroupMoments:
    """Count, mean and squared deviations of the values of each group.

    Those of a group depend on its own values only, in their order; those of all groups are sums over groups, in their
    order and in float64, which are the same in whatever parts the groups are computed. Shapes: G groups; K values of
    all of them.

    Examples:
        >>> moments = GroupMoments.of(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]), 2)
        >>> moments.mean, moments.variance()
        (3.0, 4.666666666666667)
    """

    count_G: NDArray[np.int64]
    mean_G: NDArray[np.float64]
    """0 for a group without values."""
    squares_G: NDArray[np.float64]
    """Sum of the squared deviations from the group's own mean."""

    @classmethod
    def of(cls, values_K: Tensor, groups_K: Tensor, num_groups: int) -> GroupMoments:
        """Return the moments of `num_groups` groups.

        Args:
            groups_K: int64 index of the group of each value, ascending.
        """
        values_K, groups_K = values_K.double(), groups_K.contiguous()
        count_G = torch.bincount(groups_K, minlength=num_groups)
        first_G = torch.zeros(num_groups, dtype=torch.double)
        starts_G = count_G.cumsum(0) - count_G
        first_G[count_G > 0] = values_K[starts_G[count_G > 0]]
        # relative to a value of the group: equal values have this mean exactly, and variance 0
        relative_K = values_K - first_G[groups_K]
        mean_G = torch.bincount(groups_K, relative_K, num_groups) / count_G.clamp(min=1)
        squares_G = torch.bincount(groups_K, (relative_K - mean_G[groups_K]) ** 2, num_groups)
        return cls(count_G.numpy(), (first_G + mean_G).numpy(), squares_G.numpy())

    @classmethod
    def concatenate(cls, parts: Iterable[GroupMoments], order: NDArray[np.int64]) -> GroupMoments:
        """Return the moments of the groups of all parts, the i-th of which is number `order[i]` of them."""
        columns = zip(*((part.count_G, part.mean_G, part.squares_G) for part in parts), strict=True)
        count_G, mean_G, squares_G = (np.concatenate(column)[order] for column in columns)
        return cls(count_G, mean_G, squares_G)

    @property
    def count(self) -> int:
        """Number of values of all groups."""
        return int(self.count_G.sum())

    @property
    def mean(self) -> float:
        """Mean of the values of all groups; 0 if there are none."""
        if not self.count:
            return 0.0
        first = self.mean_G[np.argmax(self.count_G > 0)]
        return float(first + (self.count_G * (self.mean_G - first)).sum() / self.count)

    def variance(self, *, unbiased: bool = False) -> float:
        """Return the variance of the values of all groups; 0 if there are none.

        Args:
            unbiased: divide by n - 1 instead of n.
        """
        squares = (self.squares_G + self.count_G * (self.mean_G - self.mean) ** 2).sum()
        return float(squares) / max(1, self.count - unbiased)


CHUNK = 32
"""C, the chunk length: a trade-off between the length of the loop and of the rows."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Places of the elements of sequences, one after the other, in columns."""

    index_CR: Tensor
    """int64: index of the element at each place, 0 to K - 1; padding repeats the last element of its sequence."""
    is_end_CR: Tensor
    """bool: the last element of each sequence, and padding."""
    sequence_R: Tensor
    """int64: index of the sequence of each column."""

    @classmethod
    def of(cls, count_S: Tensor) -> Columns:
        """Return the places for sequences of these lengths, int64 [S], which may be 0."""
        columns_S = (count_S + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
        sequence_R = torch.repeat_interleave(columns_S)
        ends_S = count_S.cumsum(0)
        earlier_R = (columns_S.cumsum(0) - columns_S)[sequence_R]
        chunk_R = torch.arange(len(sequence_R), device=count_S.device) - earlier_R
        first_R, last_R = (ends_S - count_S)[sequence_R] + CHUNK * chunk_R, ends_S[sequence_R] - 1
        index_CR = first_R + torch.arange(CHUNK, device=count_S.device)[:, None]
        is_end_CR = index_CR >= last_R
        return cls(torch.minimum(index_CR, last_R, out=index_CR), is_end_CR, sequence_R)


def solve_backwards_(b_CR: Tensor, a_CR: Tensor) -> Tensor:
    """[C, R] solution x of x_k = b_k + a_k x_{k+1} in sequences of K elements, in place: overwrites both inputs.

    `a_CR` is 0 at the ends of sequences and in the padding.

    Chunks are stored as columns, so that each step of a loop over the C rows works on R contiguous numbers. A sequence
    begins a column; the rest of its last column is padding. Two sequences of 8 and 3 elements, with C = 3:

        0 3 6 8     b
        1 4 7 9     first, each column is solved from bottom to top as if nothing followed; each a becomes the product
        2 5 . 10    of the factors from its row to the bottom of its column

    Then the first row is again a recurrence over R elements. It is solved by doubling: log2(R) steps, each of which
    looks twice as far ahead as the previous one. Finally, product * (x at the top of the next column) is added to each
    element.

    The work is O(K + R log R), in loops of length C and log2(R). There are no divisions: factors of 0 (at the end of a
    sequence) and 1 are exact. The result of a sequence has the same bits whatever other sequences are solved with it:
    its elements are added in the same order, and products are rounded before they are added.
    """
    b_rows, a_rows = b_CR.unbind(), a_CR.unbind()
    for place in reversed(range(len(b_rows) - 1)):
        b_rows[place].add_(a_rows[place] * b_rows[place + 1])
        a_rows[place].mul_(a_rows[place + 1])
    heads_R = _solve_by_doubling(b_rows[0], a_rows[0])
    b_CR[:, :-1].add_(a_CR[:, :-1].mul_(heads_R[1:]))
    return b_CR


def _solve_by_doubling(b_R: Tensor, a_R: Tensor) -> Tensor:
    """[R] solution of the same recurrence within one row; overwrites nothing."""
    x_R, product_R, step = b_R.clone(), a_R[:-1], 1
    while step < len(x_R):
        x_R[:-step].add_(product_R * x_R[step:])
        product_R, step = product_R[:-step] * product_R[step:], 2 * step
    return x_R
