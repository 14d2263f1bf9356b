"""Losses on preference pairs: Bradley-Terry and DPO. Sequences 2k and 2k + 1 of a pack are chosen and rejected.

Shapes: T packed tokens of this rank, S sequences and B pairs of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, override

from torch import Tensor

from megarl.functional import dpo_loss, preference_loss, rpo_loss
from megarl.losses.loss import Loss, LossBatch, LossOutput, TokenScores, ValueHeadLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerryLoss(ValueHeadLoss):
    """Pairwise ranking loss of a reward or cost model.

    Columns: `margins`, and optionally `signs` (see `preference_loss`).
    """

    columns = ("margins",)

    kind: Literal["reward", "cost"]

    @override
    def __call__(self, values_T: Tensor, batch: LossBatch) -> LossOutput:
        chosen_B, rejected_B = _split_pairs(batch.at_ends(values_T))
        margins_B, _ = _split_pairs(batch.at_ends(batch.columns["margins"]))
        chosen_signs_B, rejected_signs_B = None, None
        if "signs" in batch.columns:
            chosen_signs_B, rejected_signs_B = _split_pairs(batch.at_ends(batch.columns["signs"]))
        result = preference_loss(
            chosen_B,
            rejected_B,
            margins_B=margins_B,
            kind=self.kind,
            chosen_signs_B=chosen_signs_B,
            rejected_signs_B=rejected_signs_B,
        )
        gap_B = result.chosen_rewards_B - result.rejected_rewards_B
        metrics = _pair_metrics({"accuracy": gap_B > 0, "gap": gap_B, "score": (chosen_B + rejected_B) / 2}, batch)
        return LossOutput(loss=_pair_mean(result.loss_B, batch), metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoLoss(Loss):
    """Direct preference optimization. Columns: `ref_logprobs`."""

    columns = ("ref_logprobs",)

    beta: float
    nll: float = 0.0
    """Coefficient of the chosen sequence's mean negative log-likelihood per token (RPO)."""

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> LossOutput:
        chosen_B, rejected_B = _split_pairs(batch.masked_sums(scores.logprobs_T))
        ref_chosen_B, ref_rejected_B = _split_pairs(batch.masked_sums(batch.columns["ref_logprobs"]))
        if self.nll:
            tokens_B, _ = _split_pairs(batch.sequences.sum(batch.mask_T.float()))
            result = rpo_loss(
                chosen_B,
                rejected_B,
                ref_chosen_B,
                ref_rejected_B,
                tokens_B.clamp(min=1),
                beta=self.beta,
                alpha=self.nll,
            )
        else:
            result = dpo_loss(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=self.beta)
        gap_B = result.chosen_rewards_B - result.rejected_rewards_B
        metrics = {
            "accuracy": gap_B > 0,
            "gap": gap_B,
            "chosen_reward": result.chosen_rewards_B,
            "rejected_reward": result.rejected_rewards_B,
        }
        return LossOutput(loss=_pair_mean(result.loss_B, batch), metrics=_pair_metrics(metrics, batch))


def _pair_mean(values_B: Tensor, batch: LossBatch) -> Tensor:
    """Return this pack's share of the mean over all pairs of the mini-batch, a scalar."""
    return values_B.sum() / (batch.denominators.num_sequences // 2 * batch.cp_size)


def _pair_metrics(values_B: dict[str, Tensor], batch: LossBatch) -> dict[str, Tensor]:
    return {name: _pair_mean(value_B.detach().double(), batch) for name, value_B in values_B.items()}


def _split_pairs(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """Split values [S] of chosen, rejected, chosen, ... sequences into chosen [B] and rejected [B].

    A trailing sequence that only pads the pack is dropped.
    """
    num_pairs = len(values_S) // 2
    values_B2 = values_S[: 2 * num_pairs].view(num_pairs, 2)
    return values_B2[:, 0], values_B2[:, 1]
