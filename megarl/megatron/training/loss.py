"""Computes losses and metrics from the logits of a micro-batch.

Denominators are global: the loss of a mini-batch is the sum over its micro-batches and all data- and context-parallel
ranks.

Shapes: T tokens of this rank, S sequences and B preference pairs of the pack, v = V/tp share of the vocabulary (1 for
value models). Names end in their shape: `logits_Tv` is [T, V/tp].
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
from megarl.config.algorithms.policy import PolicyConfig
from megarl.functional import (
    Denominators,
    PolicyLossOutput,
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
from megarl.megatron.loss_specs import (
    BradleyTerryLoss,
    DpoLoss,
    ImplicitPrmLoss,
    LossSpec,
    PolicyLoss,
    SftLoss,
    ValueLoss,
)
from megarl.megatron.modeling.logprobs import token_entropy, token_logprobs
from megarl.megatron.training.metric_sums import MetricSums


@dataclass(frozen=True)
class LossComputation:
    """Computes the loss of one mini-batch, micro-batch by micro-batch, and adds its metrics."""

    loss: LossSpec
    denominators: Denominators
    """Global token and sequence counts of the mini-batch."""
    groups: ProcessGroupCollection

    def __call__(self, logits_Tv: Tensor, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        """Return this micro-batch's share of the loss, a scalar, from logits [T, V/tp] (values [T, 1]).

        Overwrites `logits_Tv`.
        """
        match self.loss:
            case ValueLoss(clip=clip):
                value = self._value_loss(logits_Tv[:, 0], batch, clip, metrics)
            case BradleyTerryLoss(kind=kind):
                value = self._bradley_terry_loss(logits_Tv[:, 0], batch, kind, metrics)
            case SftLoss() | PolicyLoss() | DpoLoss() | ImplicitPrmLoss():
                value = self._language_model_loss(self.loss, logits_Tv, batch, metrics)
        metrics.add("loss", value)
        return value

    def _language_model_loss(
        self,
        loss: SftLoss | PolicyLoss | DpoLoss | ImplicitPrmLoss,
        logits_Tv: Tensor,
        batch: PackedBatch,
        metrics: MetricSums,
    ) -> Tensor:
        entropy_T = token_entropy(logits_Tv.detach(), self.groups.tp)
        metrics.add("entropy", self._token_mean(entropy_T, batch))
        logprobs_T = token_logprobs(logits_Tv, batch.target_ids_T)
        match loss:
            case SftLoss():
                return self._token_mean(-logprobs_T, batch)
            case PolicyLoss():
                return self._policy_gradient_loss(loss, logprobs_T, batch, metrics)
            case DpoLoss():
                return self._dpo_loss(loss, logprobs_T, batch, metrics)
            case ImplicitPrmLoss(beta=beta):
                return self._implicit_prm_loss(beta, logprobs_T, batch, metrics)

    def _policy_gradient_loss(
        self, loss: PolicyLoss, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums
    ) -> Tensor:
        algorithm = loss.algorithm
        policy = _policy_loss(algorithm, logprobs_T, batch, self._sequences(batch))
        self._policy_metrics(policy, logprobs_T, batch, metrics)
        loss_T = policy.loss_T
        if algorithm.rollout_is is not None:
            loss_T = loss_T * self._rollout_is_weights(algorithm, batch, metrics)
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
            nll_T = torch.where(batch.mask_T, -logprobs_T * batch.columns["positive"], 0.0)
            nll = nll_T.sum() / max(1, self.denominators.num_positive_tokens)
            metrics.add("policy/positive_nll", nll)
            value = value + loss.nll * nll
        return value

    def _policy_metrics(
        self, policy: PolicyLossOutput, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums
    ) -> None:
        old_logprobs_T = batch.columns["old_logprobs"]
        metrics.add("policy/clip_fraction", self._token_mean(policy.clipped_T.float(), batch))
        metrics.add("policy/ratio", self._token_mean(policy.ratio_T, batch))
        metrics.update_max("policy/ratio_max", torch.where(batch.mask_T, policy.ratio_T, 0.0).max())
        # k1 estimate of KL(old || new): positive means that sampled tokens became less likely
        metrics.add("policy/kl_old", self._token_mean(old_logprobs_T - logprobs_T.detach(), batch))

    def _rollout_is_weights(self, algorithm: PolicyConfig, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        """Return importance weights [T] that correct for the mismatch between engine and trainer log-probabilities."""
        assert algorithm.rollout_is is not None
        low, high = algorithm.rollout_is.bounds
        correction = rollout_correction(
            batch.columns["old_logprobs"],
            batch.rollout_logprobs_T,
            batch.mask_T,
            self._sequences(batch),
            kind=algorithm.rollout_is.kind,
            low=low,
            high=high,
        )
        metrics.add("correction/weight", self._token_mean(correction.weights_T, batch))
        metrics.add("correction/kept", self._token_mean(correction.keep_T.float(), batch))
        return correction.weights_T

    def _value_loss(self, values_T: Tensor, batch: PackedBatch, clip: float | None, metrics: MetricSums) -> Tensor:
        result = value_loss(values_T, batch.columns["values"], batch.columns["returns"], clip=clip)
        metrics.add("values", self._token_mean(values_T, batch))
        metrics.add("clip_fraction", self._token_mean(result.clipped_T.float(), batch))
        return self._token_mean(result.loss_T, batch)

    def _bradley_terry_loss(
        self, values_T: Tensor, batch: PackedBatch, kind: Literal["reward", "cost"], metrics: MetricSums
    ) -> Tensor:
        sequences = self._sequences(batch)
        chosen_B, rejected_B = _split_pairs(sequences.sum(torch.where(batch.ends_T, values_T, 0.0)))
        margins_B, _ = _split_pairs(sequences.sum(torch.where(batch.ends_T, batch.columns["margins"], 0.0)))
        chosen_signs_B, rejected_signs_B = None, None
        if "signs" in batch.columns:
            chosen_signs_B, rejected_signs_B = _split_pairs(
                sequences.sum(torch.where(batch.ends_T, batch.columns["signs"], 0.0))
            )
        result = preference_loss(
            chosen_B,
            rejected_B,
            margins_B=margins_B,
            kind=kind,
            chosen_signs_B=chosen_signs_B,
            rejected_signs_B=rejected_signs_B,
        )
        gap_B = result.chosen_rewards_B - result.rejected_rewards_B
        self._pair_metrics({"accuracy": gap_B > 0, "gap": gap_B, "score": (chosen_B + rejected_B) / 2}, metrics)
        return self._pair_mean(result.loss_B)

    def _dpo_loss(self, loss: DpoLoss, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        sequences, mask_T = self._sequences(batch), batch.mask_T
        chosen_B, rejected_B = _split_pairs(sequences.sum(torch.where(mask_T, logprobs_T, 0.0)))
        ref_chosen_B, ref_rejected_B = _split_pairs(
            sequences.sum(torch.where(mask_T, batch.columns["ref_logprobs"], 0.0))
        )
        if loss.nll:
            tokens_B, _ = _split_pairs(sequences.sum(mask_T.float()))
            result = rpo_loss(
                chosen_B,
                rejected_B,
                ref_chosen_B,
                ref_rejected_B,
                tokens_B.clamp(min=1),
                beta=loss.beta,
                alpha=loss.nll,
            )
        else:
            result = dpo_loss(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, beta=loss.beta)
        gap_B = result.chosen_rewards_B - result.rejected_rewards_B
        self._pair_metrics(
            {
                "accuracy": gap_B > 0,
                "gap": gap_B,
                "chosen_reward": result.chosen_rewards_B,
                "rejected_reward": result.rejected_rewards_B,
            },
            metrics,
        )
        return self._pair_mean(result.loss_B)

    def _implicit_prm_loss(self, beta: float, logprobs_T: Tensor, batch: PackedBatch, metrics: MetricSums) -> Tensor:
        sequences = self._sequences(batch)
        outcomes_S = sequences.sum(torch.where(batch.ends_T, batch.columns["outcomes"], 0.0))
        is_real_S = sequences.sum(batch.ends_T.float())
        ref_T = batch.columns["ref_logprobs"]
        loss_S = implicit_reward_loss(logprobs_T, ref_T, outcomes_S, batch.mask_T, sequences, beta=beta)
        with torch.no_grad():
            log_ratios_S = sequences.sum(torch.where(batch.mask_T, logprobs_T - ref_T, 0.0))
            correct_S = ((log_ratios_S > 0) == (outcomes_S > 0.5)).float() * is_real_S
        metrics.add("accuracy", correct_S.sum() / (self.denominators.num_sequences * self._cp_size))
        return (loss_S * is_real_S).sum() / (self.denominators.num_sequences * self._cp_size)

    @property
    def _cp_size(self) -> int:
        """Context-parallel size. These ranks compute the same per-sequence terms, so each adds 1 / cp of them."""
        size: int = self.groups.cp.size()
        return size

    def _sequences(self, batch: PackedBatch) -> Sequences:
        return Sequences(
            ids_T=batch.sequence_ids_T,
            count=len(batch.cu_seqlens_S) - 1,
            reduce=_make_all_reduce(self.groups.cp) if self.groups.cp.size() > 1 else None,
        )

    def _token_mean(self, values_T: Tensor, batch: PackedBatch) -> Tensor:
        return aggregate(
            values_T, batch.mask_T, batch.sequence_tokens_T, mode="token-mean", denominators=self.denominators
        )

    def _pair_mean(self, values_B: Tensor) -> Tensor:
        return values_B.sum() / (self.denominators.num_sequences // 2 * self._cp_size)

    def _pair_metrics(self, values_B: dict[str, Tensor], metrics: MetricSums) -> None:
        for name, value_B in values_B.items():
            metrics.add(name, self._pair_mean(value_B.detach().double()))


def add_mismatch_metrics(batch: PackedBatch, num_tokens: int, metrics: MetricSums) -> None:
    """Add metrics of the difference between trainer and engine log-probabilities of the sampled tokens.

    Args:
        num_tokens: sampled tokens of the mini-batch on all ranks.
    """
    difference_T = torch.where(batch.mask_T, batch.columns["old_logprobs"] - batch.rollout_logprobs_T, 0.0)
    metrics.update_max("train_infer_mismatch/logprob_abs_max", difference_T.abs().max())
    metrics.add("train_infer_mismatch/logprob_abs_mean", difference_T.abs().sum() / num_tokens)
    # k3 estimate of KL(rollout || trainer), Schulman 2020: e^x - 1 - x >= 0
    metrics.add("train_infer_mismatch/kl", (difference_T.exp() - 1 - difference_T).sum() / num_tokens)


def _policy_loss(
    algorithm: PolicyConfig, logprobs_T: Tensor, batch: PackedBatch, sequences: Sequences
) -> PolicyLossOutput:
    """Return the per-token policy loss [T], with ratios and clipped tokens, of the configured algorithm."""
    old_T, advantages_T, mask_T = batch.columns["old_logprobs"], batch.columns["advantages"], batch.mask_T
    low, high = algorithm.clip_bounds
    match algorithm.policy_loss:
        case "ppo_clip":
            return clipped_policy_loss(
                logprobs_T, old_T, advantages_T, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip
            )
        case "gspo":
            return gspo_loss(logprobs_T, old_T, advantages_T, mask_T, sequences, clip_low=low, clip_high=high)
        case "cispo":
            return cispo_loss(logprobs_T, old_T, advantages_T, clip_high=high)
        case "gmpo":
            return gmpo_loss(logprobs_T, old_T, advantages_T, mask_T, sequences, clip_low=low, clip_high=high)


def _split_pairs(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """Split values [S] of chosen, rejected, chosen, ... sequences into chosen [B] and rejected [B].

    A trailing sequence that only pads the pack is dropped.
    """
    num_pairs = len(values_S) // 2
    values_B2 = values_S[: 2 * num_pairs].view(num_pairs, 2)
    return values_B2[:, 0], values_B2[:, 1]


def _make_all_reduce(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a differentiable all-reduce (sum) over the group."""

    def reduce(value: Tensor) -> Tensor:
        total: Tensor = _AllReduce.apply(value, group)  # type: ignore[no-untyped-call]
        return total

    return reduce


class _AllReduce(torch.autograd.Function):
    """All-reduce (sum) whose backward pass all-reduces the gradients of the ranks."""

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
