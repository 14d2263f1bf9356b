"""Losses on given answers: SFT, critics, and implicit process reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from megarl.functional import implicit_reward_loss, value_loss
from megarl.losses.loss import Loss, LossBatch, LossOutput, TokenScores, ValueHeadLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class SftLoss(Loss):
    """Mean negative log-likelihood of the tokens in the loss mask (cross-entropy). Reads no columns."""

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> LossOutput:
        return LossOutput(loss=batch.token_mean(-scores.logprobs_T))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(ValueHeadLoss):
    """Clipped mean squared error of a critic.

    Columns: `values` (the critic's, before the step's first update) and `returns`.
    """

    columns = ("values", "returns")

    clip: float | None
    """Largest change of a value that the loss rewards; None: no clipping."""

    @override
    def __call__(self, values_T: Tensor, batch: LossBatch) -> LossOutput:
        result = value_loss(values_T, batch.columns["values"], batch.columns["returns"], clip=self.clip)
        metrics = {
            "values": batch.token_mean(values_T),
            "clip_fraction": batch.token_mean(result.clipped_T.float()),
        }
        return LossOutput(loss=batch.token_mean(result.loss_T), metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitPrmLoss(Loss):
    """Cross-entropy of an implicit process reward model. Columns: `ref_logprobs` and `outcomes`."""

    columns = ("ref_logprobs", "outcomes")

    beta: float

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> LossOutput:
        logprobs_T, ref_T = scores.logprobs_T, batch.columns["ref_logprobs"]
        outcomes_S = batch.at_ends(batch.columns["outcomes"])
        is_real_S = batch.sequences.sum(batch.pack.ends_T.float())
        loss_S = implicit_reward_loss(logprobs_T, ref_T, outcomes_S, batch.mask_T, batch.sequences, beta=self.beta)
        with torch.no_grad():
            log_ratios_S = batch.masked_sums(logprobs_T - ref_T)
            correct_S = ((log_ratios_S > 0) == (outcomes_S > 0.5)).float() * is_real_S
        metrics = {"accuracy": batch.sequence_mean(correct_S)}
        return LossOutput(loss=batch.sequence_mean(loss_S * is_real_S), metrics=metrics)
