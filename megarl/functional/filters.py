"""Filtering and resampling of completions, and the length penalty. Shapes: N completions, G groups, L of one group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FilterKind = Literal["pow", "max_min", "max_random"]

WEIGHT_FLOOR = 1e-8
"""Added to every sampling weight, so that the weights of a group never sum to 0."""


def overlong_penalty(lengths_N: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """float32 [N] penalty min(-(length - (max_length - buffer)) / buffer * factor, 0), to be added to the rewards.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to the buffer, -factor at its end. No
    completion is longer than `max_length`, where generation stops.

    Examples:
        >>> overlong_penalty(torch.tensor([60, 90, 100]), max_length=100, buffer=20, factor=1.0).tolist()
        [0.0, -0.5, -1.0]
    """
    excess_N = lengths_N.double() - (max_length - buffer)
    return (-excess_N / buffer * factor).clamp(max=0).float()


def keep_informative_groups(scores_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Bool [N] mask of completions whose group has differing scores (DAPO, arXiv 2503.14476, equation 11).

    Examples:
        >>> keep_informative_groups(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
        [True, True, False, False]
    """
    lowest_N, highest_N = _group_min_max(scores_N, group_ids_N)
    return highest_N > lowest_N


def pf_ppo_weights(rewards_N: Tensor, group_ids_N: Tensor, *, kind: FilterKind) -> Tensor:
    """float64 [N] weights to resample each group's completions with (PF-PPO, arXiv 2409.06957).

    The paper weights a completion by its rank among the completions of its prompt: only the comparison within the group
    counts, not the sign or scale of the reward.

    `pow`: s^2, where s = (R - min) / (max - min) of the group; s = R for rewards of 0 and 1. (Plain |R|^2 would favor
    the most negative rewards.) If all rewards are equal, so are the weights.
    `max_min`: 1 for the group's highest and lowest rewards, else 0.
    `max_random`: .4 for the group's highest rewards, else .1.

    All weights are increased by 1e-8; equal rewards have equal weights.

    Examples:
        >>> weights_N = pf_ppo_weights(torch.tensor([2.0, 0.0, 1.0]), torch.tensor([0, 0, 0]), kind="pow")
        >>> [round(weight, 4) for weight in weights_N.tolist()]
        [1.0, 0.0, 0.25]
    """
    rewards_N = rewards_N.double()
    lowest_N, highest_N = _group_min_max(rewards_N, group_ids_N)
    at_highest_N = rewards_N == highest_N
    match kind:
        case "pow":
            range_N = highest_N - lowest_N
            weights_N = ((rewards_N - lowest_N) / torch.where(range_N > 0, range_N, 1.0)).square()
        case "max_min":
            weights_N = (at_highest_N | (rewards_N == lowest_N)).double()
        case "max_random":
            weights_N = torch.full_like(rewards_N, 0.1).masked_fill(at_highest_N, 0.4)
    return weights_N + WEIGHT_FLOOR


def pf_ppo_resample(weights_N: Tensor, group_ids_N: Tensor, *, generator: torch.Generator) -> Tensor:
    """int64 [N] indices of the resampled completions, drawn by weight with replacement within each group.

    Examples:
        >>> weights_N, group_ids_N = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> pf_ppo_resample(weights_N, group_ids_N, generator=torch.Generator()).tolist()
        [0, 0, 3, 3]
    """
    indices_N = torch.empty(len(group_ids_N), dtype=torch.int64, device=group_ids_N.device)
    for group_id in torch.unique(group_ids_N):
        members_L = (group_ids_N == group_id).nonzero().squeeze(1)
        drawn_L = torch.multinomial(weights_N[members_L], len(members_L), replacement=True, generator=generator)
        indices_N[members_L] = members_L[drawn_L]
    return indices_N


def _group_min_max(values_N: Tensor, group_ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """[N] lowest and [N] highest value of each completion's group."""
    groups_G, group_N = torch.unique(group_ids_N, return_inverse=True)
    empty_G = torch.zeros(len(groups_G), dtype=values_N.dtype, device=values_N.device)
    lowest_G = empty_G.scatter_reduce(0, group_N, values_N, "amin", include_self=False)
    highest_G = empty_G.scatter_reduce(0, group_N, values_N, "amax", include_self=False)
    return lowest_G[group_N], highest_G[group_N]
