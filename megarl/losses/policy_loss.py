"""Policy losses: PPO clip, GSPO, CISPO and GMPO per token, and the loss that is made from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from megarl.batch.pack import ColumnName
from megarl.config.algorithm import CispoConfig, GmpoConfig
from megarl.config.policy import (
    ClippedPolicyConfig,
    ClipRatioConfig,
    PolicyConfig,
    RolloutIsConfig,
)
from megarl.functional import (
    PolicyLossOutput,
    aggregate,
    cispo_loss,
    clipped_policy_loss,
    decoupled_policy_loss,
    gmpo_loss,
    gspo_loss,
    kl_penalty,
    rollout_correction,
)
from megarl.losses.loss import Loss, LossBatch, LossOutput, TokenLoss, TokenScores


@dataclass(frozen=True, slots=True)
class ClippedLoss(TokenLoss):
    """PPO's clipped loss per token: `clipped_policy_loss`, or `decoupled_policy_loss` if `config.decoupled` is set.

    Examples:
        >>> ClippedLoss.of(GrpoConfig(clip_ratio_high=0.28)).config.clip_ratio_high
        0.28
    """

    config: ClippedPolicyConfig

    @classmethod
    def of(cls, config: ClippedPolicyConfig) -> ClippedLoss:
        """Return the loss with the bounds of `config`."""
        return cls(config)

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> PolicyLossOutput:
        config, old_logprobs_T, advantages_T = self.config, batch.columns["old_logprobs"], batch.columns["advantages"]
        if config.decoupled is None:
            return clipped_policy_loss(
                scores.logprobs_T,
                old_logprobs_T,
                advantages_T,
                clip_low=config.clip_ratio_low,
                clip_high=config.clip_ratio_high,
                dual_clip=config.dual_clip,
            )
        return decoupled_policy_loss(
            scores.logprobs_T,
            old_logprobs_T,
            batch.pack.rollout_logprobs_T,
            advantages_T,
            clip_low=config.clip_ratio_low,
            clip_high=config.clip_ratio_high,
            behave_cap=config.decoupled.behave_cap,
            dual_clip=config.dual_clip,
        )


@dataclass(frozen=True, slots=True)
class GspoLoss(TokenLoss):
    """GSPO's loss with one ratio per sequence: `gspo_loss`."""

    config: ClipRatioConfig

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> PolicyLossOutput:
        return gspo_loss(
            scores.logprobs_T,
            batch.columns["old_logprobs"],
            batch.columns["advantages"],
            batch.mask_T,
            batch.sequences,
            clip_low=self.config.clip_ratio_low,
            clip_high=self.config.clip_ratio_high,
        )


@dataclass(frozen=True, slots=True)
class CispoLoss(TokenLoss):
    """CISPO's loss with clipped weights: `cispo_loss`."""

    config: CispoConfig

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> PolicyLossOutput:
        old_logprobs_T, advantages_T = batch.columns["old_logprobs"], batch.columns["advantages"]
        return cispo_loss(scores.logprobs_T, old_logprobs_T, advantages_T, clip_high=self.config.clip_ratio_high)


@dataclass(frozen=True, slots=True)
class GmpoLoss(TokenLoss):
    """GMPO's loss with the geometric mean of a sequence's ratios: `gmpo_loss`."""

    config: GmpoConfig

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> PolicyLossOutput:
        return gmpo_loss(
            scores.logprobs_T,
            batch.columns["old_logprobs"],
            batch.columns["advantages"],
            batch.mask_T,
            batch.sequences,
            clip_low=self.config.clip_log_ratio_low,
            clip_high=self.config.clip_log_ratio_high,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Loss):
    """Policy-gradient loss: a loss per token with correction, penalty and bonus, aggregated over the mini-batch."""

    token_loss: TokenLoss
    algorithm: PolicyConfig
    """Its `aggregation`, `entropy_coefficient`, `kl_loss` and `rollout_is` apply."""
    length_norm: int
    """Constant that `seq-mean-token-sum-norm` divides each sequence's sum by, in tokens."""
    nll: float = 0.0
    """Coefficient of the negative log-likelihood of sequences whose `positive` is 1."""

    @property
    @override
    def columns(self) -> tuple[ColumnName, ...]:
        """The columns of the token loss, and those of the options that are set."""
        kl = () if self.algorithm.kl_loss is None else ("ref_logprobs",)
        return (*self.token_loss.columns, *kl, *(("positive",) if self.nll else ()))

    @override
    def __call__(self, scores: TokenScores, batch: LossBatch) -> LossOutput:
        algorithm, logprobs_T = self.algorithm, scores.logprobs_T
        policy = self.token_loss(scores, batch)
        metrics = _policy_metrics(policy, logprobs_T, batch)
        loss_T = policy.loss_T
        if algorithm.rollout_is is not None:
            weights_T, correction_metrics = _rollout_correction(algorithm.rollout_is, batch)
            loss_T = loss_T * weights_T
            metrics |= correction_metrics
        if algorithm.kl_loss is not None:
            kl_T = kl_penalty(logprobs_T, batch.columns["ref_logprobs"], kind=algorithm.kl_loss.kind)
            metrics["policy/kl_reference"] = batch.token_mean(kl_T)
            loss_T = loss_T + algorithm.kl_loss.coefficient * kl_T
        if algorithm.entropy_coefficient:
            loss_T = loss_T - algorithm.entropy_coefficient * scores.entropy_T
        value = aggregate(
            loss_T,
            batch.mask_T,
            batch.pack.sequence_tokens_T,
            mode=algorithm.aggregation,
            denominators=batch.denominators,
            length_norm=self.length_norm,
        )
        if self.nll:
            nll_T = torch.where(batch.mask_T, -logprobs_T * batch.columns["positive"], 0.0)
            nll = nll_T.sum() / max(1, batch.denominators.num_positive_tokens)
            metrics["policy/positive_nll"] = nll
            value = value + self.nll * nll
        ratio_max = torch.where(batch.mask_T, policy.ratio_T, 0.0).max()
        return LossOutput(loss=value, metrics=metrics, maxima={"policy/ratio_max": ratio_max})


def _policy_metrics(policy: PolicyLossOutput, logprobs_T: Tensor, batch: LossBatch) -> dict[str, Tensor]:
    metrics = {
        "policy/clip_fraction": batch.token_mean(policy.clipped_T.float()),
        "policy/ratio": batch.token_mean(policy.ratio_T),
    }
    if policy.dual_clipped_T is not None:
        metrics["policy/dual_clip_fraction"] = batch.token_mean(policy.dual_clipped_T.float())
    if policy.weight_T is not None:
        metrics["correction/weight"] = batch.token_mean(policy.weight_T)
    # k1 estimate of KL(old || new): positive means that sampled tokens became less likely
    metrics["policy/kl_old"] = batch.token_mean(batch.columns["old_logprobs"] - logprobs_T.detach())
    return metrics


def _rollout_correction(config: RolloutIsConfig, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weights [T] that correct for the mismatch between engine and trainer log-probabilities, and metrics."""
    low, high = config.bounds
    correction = rollout_correction(
        batch.columns["old_logprobs"],
        batch.pack.rollout_logprobs_T,
        batch.mask_T,
        batch.sequences,
        kind=config.kind,
        low=low,
        high=high,
    )
    metrics = {
        "correction/weight": batch.token_mean(correction.weights_T),
        "correction/kept": batch.token_mean(correction.keep_T.float()),
    }
    return correction.weights_T, metrics
