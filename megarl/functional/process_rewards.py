"""Implicit process rewards from a reward model trained on outcomes only: PRIME (arXiv 2502.01456).

Shapes: T packed tokens, S sequences of the pack, N completions. Sequence n of the pack is completion n; the sequences
after the N-th are padding. q_t = log pi_rm - log pi_ref of token t.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megarl.functional.advantages import discounted_returns, group_advantages, spread_completions
from megarl.functional.losses import Sequences


@torch.no_grad()
def prime_rewards(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    outcome_rewards_N: Tensor,
    group_ids_N: Tensor,
    mask_T: Tensor,
    cu_seqlens_S: Tensor,
    *,
    beta: float,
    process_coefficient: float,
    outcome_coefficient: float,
    scales_process: bool = False,
) -> Tensor:
    """[T] PRIME advantages: leave-one-out process and outcome rewards, weighted and added; 0 outside the mask.

    Process: r_t = beta q_t minus the mean, over the other completions of the group, of their mean r; then summed over
    this and all later tokens. Outcome: R minus the mean R of the others, on every token (algorithm 1).

    Examples:
        >>> rewards_T = prime_rewards(
        ...     torch.tensor([0.0, -1.0, 0.0, -2.0]),
        ...     torch.tensor([0.0, -2.0, 0.0, -2.0]),
        ...     torch.tensor([1.0, 0.0]),  # outcomes
        ...     torch.tensor([0, 0]),
        ...     torch.tensor([False, True, False, True]),
        ...     torch.tensor([0, 2, 4]),
        ...     beta=0.5,
        ...     process_coefficient=1.0,
        ...     outcome_coefficient=1.0,
        ... )
        >>> rewards_T.tolist()
        [0.0, 1.5, 0.0, -1.5]

    Args:
        logprobs_T: log-probs of the implicit reward model.
        scales_process: multiply the deviation of r_t from its completion's mean by n / (n - 1), n the size of the
            group, as in the authors' code (verl, recipe/prime); the mean itself has the same baseline either way.

    Raises:
        ValueError: a group has fewer than two members.
    """
    process_T = beta * (logprobs_T - ref_logprobs_T)
    mean_N = Sequences.of(cu_seqlens_S).mean(process_T, mask_T)[: len(group_ids_N)]
    others_N = mean_N - group_advantages(mean_N, group_ids_N, kind="rloo")
    if scales_process:
        own_T = spread_completions(mean_N, mask_T, cu_seqlens_S)
        _, group_N, count_G = torch.unique(group_ids_N, return_inverse=True, return_counts=True)
        factor_N = (count_G / (count_G - 1))[group_N].to(process_T.dtype)
        process_T = own_T + (process_T - own_T) * spread_completions(factor_N, mask_T, cu_seqlens_S)
    centred_T = process_T - spread_completions(others_N, mask_T, cu_seqlens_S)
    outcome_N = group_advantages(outcome_rewards_N, group_ids_N, kind="rloo").to(process_T.dtype)
    return process_coefficient * discounted_returns(
        centred_T, mask_T, cu_seqlens_S, gamma=1.0
    ) + outcome_coefficient * spread_completions(outcome_N, mask_T, cu_seqlens_S)


def implicit_reward_loss(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    outcomes_S: Tensor,
    mask_T: Tensor,
    sequences: Sequences,
    *,
    beta: float,
) -> Tensor:
    """[S] loss of the implicit reward model: binary cross-entropy of outcomes in [0, 1] with logit beta * sum of q.

    0 for sequences without tokens inside the mask. All context-parallel ranks that share the sequences get the same
    loss: count it once.

    Examples:
        >>> loss_S = implicit_reward_loss(
        ...     torch.tensor([0.0, -1.0]),
        ...     torch.tensor([0.0, -3.0]),
        ...     torch.tensor([1.0]),
        ...     torch.tensor([False, True]),
        ...     Sequences.of(torch.tensor([0, 2])),
        ...     beta=0.5,
        ... )
        >>> [round(loss, 4) for loss in loss_S.tolist()]
        [0.3133]
    """
    log_ratio_T = torch.where(mask_T, logprobs_T - ref_logprobs_T, torch.zeros_like(logprobs_T))
    logits_S = beta * sequences.sum(log_ratio_T)
    loss_S = F.binary_cross_entropy_with_logits(logits_S, outcomes_S.to(logits_S.dtype), reduction="none")
    return torch.where(sequences.sum(mask_T.to(logits_S.dtype)) > 0, loss_S, torch.zeros_like(loss_S))
