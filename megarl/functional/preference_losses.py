"""Losses over pairs of a chosen and a rejected answer. Shapes: B pairs; all tensors hold one value per answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class PreferenceLossOutput:
    """Result of a preference loss, per pair.

    Examples:
        >>> output = preference_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))
        >>> (output.chosen_rewards_B > output.rejected_rewards_B).tolist()  # which pairs are classified correctly
        [True, False]
    """

    loss_B: Tensor

    chosen_rewards_B: Tensor
    """Detached; a pair is classified correctly if this exceeds `rejected_rewards_B`."""

    rejected_rewards_B: Tensor
    """Detached, in the same unit as `chosen_rewards_B`."""


def dpo_loss(
    chosen_logprobs_B: Tensor,
    rejected_logprobs_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    *,
    beta: float,
) -> PreferenceLossOutput:
    """DPO loss -log sigmoid(r_chosen - r_rejected), r = beta (log pi - log pi_ref) (arXiv 2305.18290, equation 7).

    Examples:
        >>> chosen_B, rejected_B, ref_B = torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([-2.0])
        >>> output = dpo_loss(chosen_B, rejected_B, ref_B, ref_B, beta=0.5)
        >>> [round(loss, 4) for loss in output.loss_B.tolist()]
        [0.3133]

    Args:
        chosen_logprobs_B: summed over the tokens of the answer, like the other three.
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
) -> PreferenceLossOutput:
    """RPO loss: `dpo_loss` plus alpha times the NLL per token of the chosen answer (arXiv 2404.19733, equation 1).

    Examples:
        >>> chosen_B, rejected_B, ref_B = torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([-2.0])
        >>> output = rpo_loss(chosen_B, rejected_B, ref_B, ref_B, torch.tensor([4]), beta=0.5, alpha=1.0)
        >>> [round(loss, 4) for loss in output.loss_B.tolist()]
        [0.5633]

    Args:
        chosen_tokens_B: number of tokens summed in `chosen_logprobs_B`; the paper counts prompt tokens as well.
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
) -> PreferenceLossOutput:
    """Bradley-Terry loss on the scores of a reward or cost model.

    `reward`: -log sigmoid(R_chosen - R_rejected - margin) (arXiv 2203.02155, equation 1; margins: arXiv 2307.09288,
    equation 2).
    `cost`: the chosen answer is less harmful and has the lower cost: -log sigmoid(C_rejected - C_chosen - margin)
    (Safe RLHF, arXiv 2310.12773, section 3.2); the returned rewards are negated costs. Safety signs s add
    -log sigmoid(s C) for both answers (same section), which makes the cost of harmful answers positive.

    Examples:
        >>> output = preference_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))
        >>> [round(loss, 4) for loss in output.loss_B.tolist()]
        [0.3133, 1.3133]

    Args:
        margins_B: required score differences, 0 or more; None: 0.
        chosen_signs_B: only for `cost`: +1 if the chosen answer is harmful, -1 if it is safe.
        rejected_signs_B: the same for the rejected answer; give both or neither.

    Raises:
        ValueError: signs with kind `reward`, or signs of one answer only.
    """
    if (chosen_signs_B is None) != (rejected_signs_B is None):
        raise ValueError("preference_loss needs the signs of both answers or of none, got one")
    if kind == "reward":
        if chosen_signs_B is not None:
            raise ValueError("preference_loss with safety signs needs kind 'cost', got 'reward'")
        return _bradley_terry(chosen_scores_B, rejected_scores_B, margins_B)
    pair = _bradley_terry(-chosen_scores_B, -rejected_scores_B, margins_B)
    if chosen_signs_B is None or rejected_signs_B is None:
        return pair
    signs_B = F.logsigmoid(chosen_signs_B * chosen_scores_B) + F.logsigmoid(rejected_signs_B * rejected_scores_B)
    return replace(pair, loss_B=pair.loss_B - signs_B)


def _bradley_terry(chosen_B: Tensor, rejected_B: Tensor, margins_B: Tensor | None = None) -> PreferenceLossOutput:
    difference_B = chosen_B - rejected_B if margins_B is None else chosen_B - rejected_B - margins_B
    return PreferenceLossOutput(-F.logsigmoid(difference_B), chosen_B.detach(), rejected_B.detach())
