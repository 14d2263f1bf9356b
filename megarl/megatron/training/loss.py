"""From a micro-batch's logits to its share of the mini-batch's loss, and the metrics on the way.

The shares of all micro-batches and ranks add up: every denominator is global. Shapes: T tokens of this rank, S
sequences and B pairs of the pack, v share of the vocabulary, or 1 where the model's head gives values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.batch.pack import PackedBatch
from megarl.config.algorithms.algorithm import PolicyConfig
from megarl.functional import (
    Denominators,
    PolicyLoss,
    Sequences,
    aggregate,
    cispo_loss,
    clipped_policy_loss,
    dpo_loss,
    gmpo_loss,
    gspo_loss,
    implicit_reward_loss,
    kl_penalty,
    preference_loss,
    rollout_correction,
    rpo_loss,
    value_loss,
)
from megarl.megatron.modeling.logprobs import token_entropy, token_logprobs
from megarl.megatron.requests import (
    DirectPreferenceLoss,
    ImplicitRewardLoss,
    LikelihoodLoss,
    Loss,
    PairLoss,
    ReturnsLoss,
    SurrogateLoss,
)
from megarl.megatron.training.metric_sums import MetricSums


@dataclass(frozen=True)
class Objective:
    """One mini-batch's."""

    loss: Loss
    denominators: Denominators
    groups: ProcessGroupCollection

    def __call__(self, logits_Tv: Tensor, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        """Scalar; overwrites `logits_Tv`."""
        match self.loss:
            case ReturnsLoss(clip=clip):
                value = self._returns(logits_Tv[:, 0], batch, clip, metrics)
            case PairLoss(kind=kind):
                value = self._pairs(logits_Tv[:, 0], batch, kind, metrics)
            case LikelihoodLoss() | SurrogateLoss() | DirectPreferenceLoss() | ImplicitRewardLoss():
                value = self._language(self.loss, logits_Tv, batch, metrics)
        metrics.add("loss", value)
        return value

    def _language(
        self,
        loss: LikelihoodLoss | SurrogateLoss | DirectPreferenceLoss | ImplicitRewardLoss,
        logits_Tv: Tensor,
        batch: PackedBatch,
        metrics: MetricSums,
    ) -> Tensor:
        entropy_T = token_entropy(logits_Tv.detach(), self.groups.tp)
        metrics.add("entropy", self._token_mean(entropy_T, batch))
        logprobs_T = token_logprobs(logits_Tv, batch.target_ids_T)
        match loss:
            case LikelihoodLoss():
                return self._token_mean(-logprobs_T, batch)
            case SurrogateLoss():
                return self._surrogate(loss, logprobs_T, batch, metrics)
            case DirectPreferenceLoss():
                return self._direct_preference(loss, logprobs_T, batch, metrics)
            case ImplicitRewardLoss(beta=beta):
                return self._implicit_reward(beta, logprobs_T, batch, metrics)

    def _surrogate(self, loss: SurrogateLoss, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        algorithm = loss.algorithm
        policy = _policy_loss(algorithm, logprobs_T, batch, self._sequences(batch))
        self._policy_metrics(policy, logprobs_T, batch, metrics)
        loss_T = policy.loss_T
        if algorithm.correction is not None:
            loss_T = loss_T * self._corrected(algorithm, batch, metrics)
        if algorithm.kl_loss is not None:
            kl_T = kl_penalty(logprobs_T, batch.columns["ref_logprobs"], kind=algorithm.kl_loss.kind)
            metrics.add("policy/kl_reference", self._token_mean(kl_T, batch))
            loss_T = loss_T + algorithm.kl_loss.coefficient * kl_T
        value = aggregate(
            loss_T,
            batch.mask_T,
            batch.sequence_tokens_T,
            mode=algorithm.aggregation,
            denominators=self.denominators,
            length_norm=loss.length_norm,
        )
        if loss.nll:
            likelihood_T = torch.where(batch.mask_T, -logprobs_T * batch.columns["positive"], 0.0)
            nll = likelihood_T.sum() / max(1, self.denominators.num_positive_tokens)
            metrics.add("policy/positive_nll", nll)
            value = value + loss.nll * nll
        return value

    def _policy_metrics(self, policy: PolicyLoss, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums) -> None:
        old_logprobs_T = batch.columns["old_logprobs"]
        metrics.add("policy/clip_fraction", self._token_mean(policy.clipped_T.float(), batch))
        metrics.add("policy/ratio", self._token_mean(policy.ratio_T, batch))
        metrics.maximum("policy/ratio_max", torch.where(batch.mask_T, policy.ratio_T, 0.0).max())
        # k1 estimate of KL(old || new): positive means that sampled tokens became less likely
        metrics.add("policy/kl_old", self._token_mean(old_logprobs_T - logprobs_T.detach(), batch))

    def _corrected(self, algorithm: PolicyConfig, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        """[T] weights for what engine and trainer disagree about."""
        assert algorithm.correction is not None
        low, high = algorithm.correction.bounds
        correction = rollout_correction(
            batch.columns["old_logprobs"],
            batch.rollout_logprobs_T,
            batch.mask_T,
            self._sequences(batch),
            kind=algorithm.correction.kind,
            low=low,
            high=high,
        )
        metrics.add("correction/weight", self._token_mean(correction.weights_T, batch))
        metrics.add("correction/kept", self._token_mean(correction.keep_T.float(), batch))
        return correction.weights_T

    def _returns(self, values_T: Tensor, batch: PackedBatch, clip: float | None, metrics: MetricSums) -> Tensor:
        found = value_loss(values_T, batch.columns["values"], batch.columns["returns"], clip=clip)
        metrics.add("values", self._token_mean(values_T, batch))
        metrics.add("clip_fraction", self._token_mean(found.clipped_T.float(), batch))
        return self._token_mean(found.loss_T, batch)

    def _pairs(
        self, values_T: Tensor, batch: PackedBatch, kind: Literal["reward", "cost"], metrics: MetricSums
    ) -> Tensor:
        sequences = self._sequences(batch)
        better_B, worse_B = _pairs(sequences.sum(torch.where(batch.ends_T, values_T, 0.0)))
        margins_B, _ = _pairs(sequences.sum(torch.where(batch.ends_T, batch.columns["margins"], 0.0)))
        better_sign_B, worse_sign_B = None, None
        if "signs" in batch.columns:
            better_sign_B, worse_sign_B = _pairs(sequences.sum(torch.where(batch.ends_T, batch.columns["signs"], 0.0)))
        found = preference_loss(
            better_B,
            worse_B,
            margins_B=margins_B,
            kind=kind,
            chosen_signs_B=better_sign_B,
            rejected_signs_B=worse_sign_B,
        )
        gap_B = found.chosen_rewards_B - found.rejected_rewards_B
        self._pair_metrics({"accuracy": gap_B > 0, "gap": gap_B, "score": (better_B + worse_B) / 2}, metrics)
        return self._pair_mean(found.loss_B)

    def _direct_preference(
        self, loss: DirectPreferenceLoss, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums
    ) -> Tensor:
        sequences, mask_T = self._sequences(batch), batch.mask_T
        better_B, worse_B = _pairs(sequences.sum(torch.where(mask_T, logprobs_T, 0.0)))
        ref_better_B, ref_worse_B = _pairs(sequences.sum(torch.where(mask_T, batch.columns["ref_logprobs"], 0.0)))
        if loss.nll:
            tokens_B, _ = _pairs(sequences.sum(mask_T.float()))
            found = rpo_loss(
                better_B, worse_B, ref_better_B, ref_worse_B, tokens_B.clamp(min=1), beta=loss.beta, alpha=loss.nll
            )
        else:
            found = dpo_loss(better_B, worse_B, ref_better_B, ref_worse_B, beta=loss.beta)
        gap_B = found.chosen_rewards_B - found.rejected_rewards_B
        self._pair_metrics(
            {
                "accuracy": gap_B > 0,
                "gap": gap_B,
                "chosen_reward": found.chosen_rewards_B,
                "rejected_reward": found.rejected_rewards_B,
            },
            metrics,
        )
        return self._pair_mean(found.loss_B)

    def _implicit_reward(self, beta: float, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        sequences = self._sequences(batch)
        outcomes_S = sequences.sum(torch.where(batch.ends_T, batch.columns["outcomes"], 0.0))
        real_S = sequences.sum(batch.ends_T.float())
        ref_T = batch.columns["ref_logprobs"]
        loss_S = implicit_reward_loss(logprobs_T, ref_T, outcomes_S, batch.mask_T, sequences, beta=beta)
        with torch.no_grad():
            implied_S = sequences.sum(torch.where(batch.mask_T, logprobs_T - ref_T, 0.0))
            right_S = ((implied_S > 0) == (outcomes_S > 0.5)).float() * real_S
        metrics.add("accuracy", right_S.sum() / (self.denominators.num_sequences * self._copies))
        return (loss_S * real_S).sum() / (self.denominators.num_sequences * self._copies)

    @property
    def _copies(self) -> int:
        """Ranks that compute the same of whole sequences; each adds its share."""
        size: int = self.groups.cp.size()
        return size

    def _sequences(self, batch: PackedBatch) -> Sequences:
        return Sequences(
            ids_T=batch.sequence_ids_T,
            count=len(batch.cu_seqlens_S) - 1,
            reduce=_adds_up_over(self.groups.cp) if self.groups.cp.size() > 1 else None,
        )

    def _token_mean(self, values_T: Tensor, batch: PackedBatch) -> Tensor:
        return aggregate(
            values_T, batch.mask_T, batch.sequence_tokens_T, mode="token-mean", denominators=self.denominators
        )

    def _pair_mean(self, values_B: Tensor) -> Tensor:
        return values_B.sum() / (self.denominators.num_sequences // 2 * self._copies)

    def _pair_metrics(self, values_B: dict[str, Tensor], metrics: MetricSums) -> None:
        for name, value_B in values_B.items():
            metrics.add(name, self._pair_mean(value_B.detach().double()))


def mismatch(batch: PackedBatch, num_tokens: int, metrics: MetricSums) -> None:
    """How far the trainer's log-probabilities are from those that the engine sampled with."""
    difference_T = torch.where(batch.mask_T, batch.columns["old_logprobs"] - batch.rollout_logprobs_T, 0.0)
    metrics.maximum("mismatch/logprob_abs_max", difference_T.abs().max())
    metrics.add("mismatch/logprob_abs_mean", difference_T.abs().sum() / num_tokens)
    # k3 estimate of KL(rollout || trainer), Schulman 2020: e^x - 1 - x >= 0
    metrics.add("mismatch/kl", (difference_T.exp() - 1 - difference_T).sum() / num_tokens)


def _policy_loss(algorithm: PolicyConfig, logprobs_T: Tensor, batch: PackedBatch, sequences: Sequences) -> PolicyLoss:
    old_T, advantages_T, mask_T = batch.columns["old_logprobs"], batch.columns["advantages"], batch.mask_T
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.surrogate:
        case "clip":
            return clipped_policy_loss(
                logprobs_T, old_T, advantages_T, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip
            )
        case "gspo":
            return gspo_loss(logprobs_T, old_T, advantages_T, mask_T, sequences, clip_low=low, clip_high=high)
        case "cispo":
            return cispo_loss(logprobs_T, old_T, advantages_T, clip_high=high)
        case "gmpo":
            return gmpo_loss(logprobs_T, old_T, advantages_T, mask_T, sequences, clip_low=low, clip_high=high)


def _pairs(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """[B] of the first of each pair, and of the second; a last sequence that only pads the pack is in none."""
    num_pairs = len(values_S) // 2
    values_B2 = values_S[: 2 * num_pairs].view(num_pairs, 2)
    return values_B2[:, 0], values_B2[:, 1]


def _adds_up_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def reduce(value: Tensor) -> Tensor:
        total: Tensor = _AllReduce.apply(value, group)  # type: ignore[no-untyped-call]
        return total

    return reduce


class _AllReduce(torch.autograd.Function):
    """The sum over a group, whose gradient is the sum of the gradients that its ranks have of it."""

    @staticmethod
    def forward(ctx, value: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        ctx.group = group
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
