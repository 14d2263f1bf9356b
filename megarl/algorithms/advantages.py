"""What each completion gained over its group. Shapes: N completions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as DeepSeekMath's GRPO does."""

GroupBaseline = Literal["grpo", "dr_grpo", "rloo"]


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
