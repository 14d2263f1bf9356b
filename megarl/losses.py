"""Losses: frozen dataclasses that are called with a pack's scores and return the pack's share of the loss.

The controller creates losses and sends them to the trainer ranks, pickled by reference to their class. Each rank calls
them once per micro-batch.

Shapes: T packed tokens of this rank, S sequences and B pairs of the pack. Entry t refers to the token that position t
predicts. Sequences 2k and 2k + 1 of a pack of pairs are the chosen and the rejected answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, override

import torch
from torch import Tensor

from megarl.batch.pack import ColumnName, PackedBatch
from megarl.config.algorithm import CispoConfig, GmpoConfig
from megarl.config.policy import (
    ClippedPolicyConfig,
    ClipRatioConfig,
    PolicyConfig,
    RolloutIsConfig,
)
from megarl.functional import (
    Denominators,
    PolicyLossOutput,
    Sequences,
    aggregate,
    cispo_loss,
    clipped_policy_loss,
    decoupled_policy_loss,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Per-token outputs of the language-model head for a pack.

    Tokens outside the loss mask never reach the head: their entries are finite and mean nothing.

    Examples:
        >>> TokenScores(logprobs_T=torch.tensor([-0.5]), entropy_T=torch.tensor([1.0])).logprobs_T.tolist()
        [-0.5]
    """

    logprobs_T: Tensor
    """float32 [T]: log-probabilities of the predicted tokens under the policy, with gradient."""
    entropy_T: Tensor
    """float32 [T]: entropies of the next-token distributions in nats, with gradient."""


ModelOutput: TypeAlias = TokenScores | Tensor
"""Output of a model for a pack: the scores of a language model, or the values of a value model, float32 [T]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """The tokens that a loss is computed on, and the counts that make means global.

    A loss is a mean over a mini-batch, of which this pack holds a part: sums are divided by counts over all packs and
    data-parallel ranks, and the shares of all of them are added.

    Examples:
            shortfall_T = (margin - scores.logprobs_T).relu() * batch.columns["advantages"]
            return rl.LossOutput(loss=batch.token_mean(shortfall_T))
    """

    pack: PackedBatch
    """The packed tokens; with context parallelism, this rank's part of them."""
    denominators: Denominators
    """Global token and sequence counts of the mini-batch."""
    sequences: Sequences
    """Maps tokens to sequences; its sums are over all context-parallel ranks."""
    cp_size: int = 1
    """Number of context-parallel ranks, which compute the same values per sequence."""

    @property
    def mask_T(self) -> Tensor:  # noqa: N802 -- suffix: shape
        """Mask of the tokens that the policy sampled, bool [T]."""
        return self.pack.mask_T

    @property
    def columns(self) -> Mapping[ColumnName, Tensor]:
        """Column name -> float32 [T]: the columns that the loss declares, such as `advantages`."""
        return self.pack.columns

    def token_mean(self, values_T: Tensor) -> Tensor:
        """Return this pack's share of the mean over all sampled tokens of the mini-batch, a scalar."""
        return aggregate(
            values_T, self.mask_T, self.pack.sequence_tokens_T, mode="token-mean", denominators=self.denominators
        )

    def sequence_mean(self, values_S: Tensor) -> Tensor:
        """Return this pack's share of the mean over all sequences of the mini-batch, a scalar; padding must be 0."""
        return values_S.sum() / (self.denominators.num_sequences * self.cp_size)

    def masked_sums(self, values_T: Tensor) -> Tensor:
        """Return the sum over the sampled tokens of each sequence, [S]."""
        return self.sequences.sum(torch.where(self.mask_T, values_T, 0.0))

    def at_ends(self, values_T: Tensor) -> Tensor:
        """Return the value at the last token of each sequence, [S]; 0 for padding."""
        return self.sequences.sum(torch.where(self.pack.ends_T, values_T, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Result of a loss for one pack.

    Examples:
        >>> LossOutput(loss=torch.tensor(0.5), metrics={"margin": torch.tensor(1.0)}).loss.item()
        0.5
    """

    loss: Tensor
    """This pack's share of the loss, a scalar with gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """This pack's shares of metrics, scalars, which are added over packs and ranks; without `entropy` and `loss`, which
    the trainer adds."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics whose maximum over packs and ranks is taken, scalars. Their names end in `_max`."""

    def __post_init__(self) -> None:
        for name in self.maxima:
            if not name.endswith("_max"):
                raise ValueError(f"the name of a maximum needs to end in _max, got {name!r}")


class Loss(ABC):
    """Base class of the losses of language models.

    Examples:
            @dataclass(frozen=True, slots=True)
            class NegativeLogLikelihood(rl.Loss):
                def __call__(self, scores: rl.TokenScores, batch: rl.LossBatch) -> rl.LossOutput:
                    return rl.LossOutput(loss=batch.token_mean(-scores.logprobs_T))
    """

    @property
    def columns(self) -> tuple[ColumnName, ...]:
        """Columns that the loss reads, none by default; a class attribute may take the place of this property.

        The trainer itself computes `old_logprobs` where a request lacks it: the log-probabilities before the first
        update of the step, which are also compared with those of the engines.
        """
        return ()

    @abstractmethod
    def __call__(self, scores: TokenScores, batch: LossBatch) -> LossOutput:
        """Return this pack's share of the loss, and metrics."""


class ValueHeadLoss(ABC):
    """Base class of the losses of models with a value head.

    Examples:
            @dataclass(frozen=True, slots=True)
            class SquaredError(rl.ValueHeadLoss):
                columns = ("returns",)

                def __call__(self, values_T: Tensor, batch: rl.LossBatch) -> rl.LossOutput:
                    return rl.LossOutput(loss=batch.token_mean((values_T - batch.columns["returns"]).square()))
    """

    @property
    def columns(self) -> tuple[ColumnName, ...]:
        """Columns that the loss reads, none by default; a class attribute may take the place of this property."""
        return ()

    @abstractmethod
    def __call__(self, values_T: Tensor, batch: LossBatch) -> LossOutput:
        """Return this pack's share of the loss, and metrics, from one value per token, [T]."""


class TokenLoss(ABC):
    """Base class of policy losses per token; `PolicyLoss` adds KL penalty, rollout correction and aggregation.

    Examples:
            @dataclass(frozen=True, slots=True)
            class Unclipped(rl.TokenLoss):
                def __call__(self, scores: rl.TokenScores, batch: rl.LossBatch) -> rl.PolicyLossOutput:
                    ratio_T = (scores.logprobs_T - batch.columns["old_logprobs"]).exp()
                    loss_T = -batch.columns["advantages"] * ratio_T
                    return rl.PolicyLossOutput(loss_T, ratio_T.detach(), torch.zeros_like(batch.mask_T))
    """

    @property
    def columns(self) -> tuple[ColumnName, ...]:
        """Columns that the loss reads; a class attribute may take the place of this property.

        `old_logprobs` are the log-probabilities before the first update of the step.
        """
        return ("advantages", "old_logprobs")

    @abstractmethod
    def __call__(self, scores: TokenScores, batch: LossBatch) -> PolicyLossOutput:
        """Return the loss of each token, not yet masked, with ratios and clipped tokens for the metrics."""


AnyLoss: TypeAlias = Loss | ValueHeadLoss
"""What a training request carries."""


def token_scores(output: ModelOutput) -> TokenScores:
    """Return the output of a language model."""
    assert isinstance(output, TokenScores), "a value model has no token scores"
    return output


def token_values(output: ModelOutput) -> Tensor:
    """Return the output of a value model, float32 [T]."""
    assert isinstance(output, Tensor), "a language model has no values"
    return output


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
