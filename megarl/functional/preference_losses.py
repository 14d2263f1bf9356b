"""Losses over pairs of answers, one of them preferred. Shapes: B pairs; all tensors are of whole answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """What a preference loss found out about each pair."""

    loss_B: Tensor

    chosen_rewards_B: Tensor
    """Detached; the pair is told apart where this is the higher one."""

    rejected_rewards_B: Tensor
    """Detached."""


def dpo_loss(
    chosen_logprobs_B: Tensor,
    rejected_logprobs_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    *,
    beta: float,
) -> PreferenceLoss:
    """-log sigmoid(r_chosen - r_rejected), r = beta (log pi - log pi_ref) (DPO, arXiv 2305.18290, equation 7).

    Args:
        chosen_logprobs_B: sums over the answer's tokens, as all four are.
    """
    return _bradley_terry(beta * (chosen_logprobs_B - ref_chosen_B), beta * (rejected_logprobs_B - ref_rejected_B))


def rpo_loss(
    chosen_logprobs_B: Tensor,
    rejected_logprobs_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    chosen_tokens_B: Tensor,
    *,
    beta: float,
    alpha: float,
) -> PreferenceLoss:
    """`dpo_loss` plus alpha times the chosen answer's negative log-likelihood per token (arXiv 2404.19733, equation 1).

    Args:
        chosen_tokens_B: how many tokens `chosen_logprobs_B` are sums of; the paper counts the prompt's as well.
    """
    dpo = dpo_loss(chosen_logprobs_B, rejected_logprobs_B, ref_chosen_B, ref_rejected_B, beta=beta)
    return replace(dpo, loss_B=dpo.loss_B - alpha * chosen_logprobs_B / chosen_tokens_B)


def preference_loss(
    chosen_scores_B: Tensor,
    rejected_scores_B: Tensor,
    *,
    margins_B: Tensor | None = None,
    kind: Literal["reward", "cost"] = "reward",
    chosen_signs_B: Tensor | None = None,
    rejected_signs_B: Tensor | None = None,
) -> PreferenceLoss:
    """Bradley-Terry's loss of a reward or cost model's scores.

    `reward`: -log sigmoid(R_chosen - R_rejected - margin) (arXiv 2203.02155, equation 1; margins: arXiv 2307.09288,
    equation 2).
    `cost`: the chosen answer is the less harmful one and costs less: -log sigmoid(C_rejected - C_chosen - margin)
    (Safe RLHF, arXiv 2310.12773, section 3.2); as rewards, costs are negative. Signs add to it
    -log sigmoid(s C) of both answers (same section), which makes costs positive where harm begins.

    Args:
        margins_B: 0 or more: by how much the scores are to differ at least. None: 0.
        chosen_signs_B: of costs alone: +1 where the chosen answer is harmful, -1 where it is safe.
        rejected_signs_B: the same of the rejected one; given together or not at all.

    Raises:
        ValueError: signs of rewards, or of one answer alone.
    """
    if (chosen_signs_B is None) != (rejected_signs_B is None):
        raise ValueError("a cost loss needs the signs of both answers or of none, got one")
    if kind == "reward":
        if chosen_signs_B is not None:
            raise ValueError("safety signs need kind 'cost', got 'reward'")
        return _bradley_terry(chosen_scores_B, rejected_scores_B, margins_B)
    pair = _bradley_terry(-chosen_scores_B, -rejected_scores_B, margins_B)
    if chosen_signs_B is None or rejected_signs_B is None:
        return pair
    signs_B = F.logsigmoid(chosen_signs_B * chosen_scores_B) + F.logsigmoid(rejected_signs_B * rejected_scores_B)
    return replace(pair, loss_B=pair.loss_B - signs_B)


def _bradley_terry(chosen_B: Tensor, rejected_B: Tensor, margins_B: Tensor | None = None) -> PreferenceLoss:
    difference_B = chosen_B - rejected_B if margins_B is None else chosen_B - rejected_B - margins_B
    return PreferenceLoss(-F.logsigmoid(difference_B), chosen_B.detach(), rejected_B.detach())
