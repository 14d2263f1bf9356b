"""Advantages per turn of episodes. Shapes: N episodes, M turns of all of them, T packed tokens.

A turn is a run of sampled tokens. Turn m is number k of its episode, counted from 0; M turns are ordered by episode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.functional.advantages import STD_EPSILON, GroupBaseline


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
