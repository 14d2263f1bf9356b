"""Losses over packed tokens and over pairs of answers, KL penalties, and corrections for the engine's log-probs.

Shapes: T packed tokens, or one rank's share of them; S sequences of the pack. Losses over pairs of a chosen and a
rejected answer: B pairs; all tensors hold one value per answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megarl.config.policy import Aggregation, KlKind


@dataclass(frozen=True, slots=True)
class Sequences:
    """Maps each token of a pack, or of one context-parallel rank's share of it, to its sequence.

    Examples:
        >>> sequences = Sequences.of(torch.tensor([0, 2, 5]))
        >>> sequences.ids_T.tolist()
        [0, 0, 1, 1, 1]
        >>> sequences.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist()
        [3.0, 12.0]
    """

    ids_T: Tensor
    """int64 [T] sequence index of each token, 0 to count - 1."""

    count: int
    """S, the number of sequences of the full pack."""

    reduce: Callable[[Tensor], Tensor] | None = None
    """Sums an [S] tensor over the context-parallel ranks that hold the other tokens; differentiable, its gradient is
    summed over them as well. None: this rank holds all tokens."""

    @classmethod
    def of(cls, cu_seqlens_S: Tensor) -> Sequences:
        """Create the map of a full pack from the [S + 1] cumulative sequence lengths."""
        count = len(cu_seqlens_S) - 1
        ids_S = torch.arange(count, device=cu_seqlens_S.device)
        return cls(ids_S.repeat_interleave(cu_seqlens_S.diff()), count)

    def sum(self, values_T: Tensor) -> Tensor:
        """[S] sum of each sequence, over all ranks."""
        sums_S = values_T.new_zeros(self.count).index_add(0, self.ids_T, values_T)
        return sums_S if self.reduce is None else self.reduce(sums_S)

    def mean(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """[S] mean of each sequence over its tokens inside the mask, over all ranks; 0 if there are none."""
        count_S = self.sum(mask_T.to(values_T.dtype))
        return self.sum(torch.where(mask_T, values_T, torch.zeros_like(values_T))) / count_S.clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """[T] value of each token's sequence."""
        return values_S.index_select(0, self.ids_T)


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is far outside any clip range and still finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Denominators of loss means: counts over the full mini-batch, all ranks and micro-batches.

    Examples:
        >>> mask_T, tokens_T = torch.tensor([False, True, True, True]), torch.tensor([3, 3, 3, 3])
        >>> denominators = Denominators(num_tokens=4, num_sequences=2)  # another pack has the other token and sequence
        >>> aggregate(torch.ones(4), mask_T, tokens_T, mode="token-mean", denominators=denominators).item()
        0.75
    """

    num_tokens: int
    """Number of tokens inside the loss mask."""

    num_sequences: int

    num_positive_tokens: int = 0
    """Number of these tokens in sequences with a positive reward."""


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """Result of a policy loss, per token.

    Examples:
        >>> output = clipped_policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2)
        >>> output.loss_T.tolist(), output.ratio_T.tolist(), output.clipped_T.tolist()
        ([-1.0], [1.0], [False])
    """

    loss_T: Tensor
    """Per token, not yet masked."""

    ratio_T: Tensor
    """Importance ratio before clipping, detached: per token, or per sequence for sequence-level losses."""

    clipped_T: Tensor
    """bool [T] mask of tokens where a bound of the ratio determined the loss."""

    weight_T: Tensor | None = None
    """Weight of each token by which `loss_T` was multiplied; None for a loss without one."""

    dual_clipped_T: Tensor | None = None
    """bool [T] mask of tokens where the dual clip determined the loss; None for a loss without one."""


@dataclass(frozen=True, slots=True)
class ValueLossOutput:
    """Result of `value_loss`, per token.

    Examples:
        >>> output = value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), clip=0.5)
        >>> output.loss_T.tolist(), output.clipped_T.tolist()
        ([1.125], [True])
    """

    loss_T: Tensor
    """Per token, not yet masked."""

    clipped_T: Tensor
    """bool [T] mask of tokens where the clip determined the loss."""


def clipped_policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLossOutput:
    """PPO loss max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) per token (arXiv 1707.06347, equation 7).

    With `dual_clip` c, the loss of tokens with A < 0 is at most -c A (arXiv 1912.09729, equation 5).

    Examples:
        >>> logprobs_T, old_logprobs_T = torch.tensor([0.5, 2.0]).log(), torch.zeros(2)  # ratios 0.5 and 2
        >>> output = clipped_policy_loss(logprobs_T, old_logprobs_T, torch.ones(2), clip_low=0.2, clip_high=0.25)
        >>> output.loss_T.tolist(), output.clipped_T.tolist()
        ([-0.5, -1.25], [False, True])
    """
    ratio_T = _ratio(logprobs_T, old_logprobs_T)
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    dual_clipped_T = None
    if dual_clip is not None:
        bound_T = -dual_clip * advantages_T
        dual_clipped_T = (advantages_T < 0) & (loss_T.detach() > bound_T)
        loss_T = torch.where(dual_clipped_T, bound_T, loss_T)
    is_clipped_T = (clipped_T > unclipped_T).detach()
    return PolicyLossOutput(loss_T, ratio_T.detach(), is_clipped_T, dual_clipped_T=dual_clipped_T)


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLossOutput:
    """GSPO loss: `clipped_policy_loss` with the sequence ratio s = exp(mean log-ratio) on each token of the sequence.

    GSPO-token (arXiv 2507.18071, equations 13 and 14): the ratio is sg(s) pi / sg(pi), whose gradient reaches the
    token's own log-prob only. With `seq-mean-token-mean` and one advantage per sequence it equals GSPO.

    Examples:
        >>> logprobs_T, old_logprobs_T = torch.tensor([0.5, 2.0]).log(), torch.zeros(2)  # ratios 0.5 and 2
        >>> mask_T, sequences = torch.tensor([True, True]), Sequences.of(torch.tensor([0, 2]))
        >>> gspo_loss(
        ...     logprobs_T, old_logprobs_T, torch.ones(2), mask_T, sequences, clip_low=3e-4, clip_high=4e-4
        ... ).ratio_T.tolist()
        [1.0, 1.0]
    """
    log_ratio_T = _zero_outside_mask(logprobs_T - old_logprobs_T, mask_T)
    sequence_T = sequences.spread(sequences.mean(log_ratio_T.detach(), mask_T))
    return clipped_policy_loss(
        sequence_T + (log_ratio_T - log_ratio_T.detach()),
        torch.zeros_like(sequence_T),
        advantages_T,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def cispo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, clip_high: float
) -> PolicyLossOutput:
    """CISPO loss -sg(min(r, 1 + clip_high)) A log pi per token (arXiv 2506.13585, equations 4 and 5, no lower bound).

    Clipped tokens keep a gradient. sg: stop-gradient.

    Examples:
        >>> logprobs_T, old_logprobs_T = torch.tensor([0.5, 4.0]).log(), torch.zeros(2)  # ratios 0.5 and 4
        >>> output = cispo_loss(logprobs_T, old_logprobs_T, torch.ones(2), clip_high=1.0)
        >>> [round(loss, 3) for loss in output.loss_T.tolist()], output.clipped_T.tolist()
        ([0.347, -2.773], [False, True])
    """
    ratio_T = _ratio(logprobs_T, old_logprobs_T).detach()
    loss_T = -ratio_T.clamp(max=1 + clip_high) * advantages_T * logprobs_T
    return PolicyLossOutput(loss_T, ratio_T, ratio_T > 1 + clip_high)


def gmpo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLossOutput:
    """GMPO loss per token: -A times the geometric mean of the sequence's clipped ratios (arXiv 2507.20673).

    Log-ratios are clipped on the side where the objective of the token would gain: to at most `clip_high` if A > 0, to
    at least -`clip_low` if A < 0 (paper: 0.4 and 0.4). Aggregated with `seq-mean-token-mean`, it is the objective of
    the paper.

    Examples:
        >>> logprobs_T, old_logprobs_T = torch.tensor([0.5, 2.0]).log(), torch.zeros(2)  # ratios 0.5 and 2
        >>> mask_T, sequences = torch.tensor([True, True]), Sequences.of(torch.tensor([0, 2]))
        >>> ones_T, clip = torch.ones(2), {"clip_low": 0.4, "clip_high": 0.4}
        >>> output = gmpo_loss(logprobs_T, old_logprobs_T, ones_T, mask_T, sequences, **clip)
        >>> [round(loss, 3) for loss in output.loss_T.tolist()], output.clipped_T.tolist()
        ([-0.864, -0.864], [False, True])
    """
    log_ratio_T = clamp_log_ratio(_zero_outside_mask(logprobs_T - old_logprobs_T, mask_T))
    clipped_log_ratio_T = torch.where(
        advantages_T < 0, log_ratio_T.clamp(min=-clip_low), log_ratio_T.clamp(max=clip_high)
    )
    loss_T = -advantages_T * sequences.spread(sequences.mean(clipped_log_ratio_T, mask_T).exp())
    ratio_T = sequences.spread(sequences.mean(log_ratio_T.detach(), mask_T).exp())
    return PolicyLossOutput(loss_T, ratio_T, (clipped_log_ratio_T != log_ratio_T).detach())


def decoupled_policy_loss(
    logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    behave_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    behave_cap: float | None = None,
    dual_clip: float | None = None,
) -> PolicyLossOutput:
    """Decoupled PPO loss: sg(pi_prox / pi_behave) times `clipped_policy_loss` with ratio pi / pi_prox.

    From arXiv 2110.00641; AReaL uses it for stale samples (arXiv 2505.24298, section 5.2). sg: stop-gradient.

    Examples:
        >>> zeros_T, behave_T = torch.zeros(2), torch.tensor([0.25, 1.0]).log()
        >>> output = decoupled_policy_loss(
        ...     zeros_T, zeros_T, behave_T, torch.ones(2), clip_low=0.2, clip_high=0.2, behave_cap=2.0
        ... )
        >>> output.loss_T.tolist()
        [-2.0, -1.0]

    Args:
        behave_cap: upper bound of the weight pi_prox / pi_behave; None: unbounded.
    """
    weight_T = _ratio(proximal_logprobs_T, behave_logprobs_T).detach()
    if behave_cap is not None:
        weight_T = weight_T.clamp(max=behave_cap)
    proximal = clipped_policy_loss(
        logprobs_T, proximal_logprobs_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return replace(proximal, loss_T=weight_T * proximal.loss_T, weight_T=weight_T)


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None) -> ValueLossOutput:
    """PPO value loss max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 per token, R the return.

    As in openai/baselines, ppo2. With `clip` None it is (V - R)^2 / 2.

    Examples:
        >>> values_T, old_values_T, returns_T = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0])
        >>> value_loss(values_T, old_values_T, returns_T, clip=None).loss_T.tolist()
        [0.5]
        >>> value_loss(values_T, old_values_T, returns_T, clip=0.5).loss_T.tolist()
        [1.125]
    """
    unclipped_T = (values_T - returns_T).square() / 2
    if clip is None:
        return ValueLossOutput(unclipped_T, torch.zeros_like(unclipped_T, dtype=torch.bool))
    clipped_T = (values_T.clamp(old_values_T - clip, old_values_T + clip) - returns_T).square() / 2
    return ValueLossOutput(torch.maximum(unclipped_T, clipped_T), (clipped_T > unclipped_T).detach())


def aggregate(
    values_T: Tensor,
    mask_T: Tensor,
    sequence_tokens_T: Tensor,
    *,
    mode: Aggregation,
    denominators: Denominators,
    length_norm: int | None = None,
) -> Tensor:
    """Scalar contribution of this pack to the mini-batch loss; the sum over all packs and ranks is the loss.

    `token-mean`: mean over all tokens of the mini-batch. `seq-mean-token-sum`: mean over sequences of token sums.
    `seq-mean-token-mean`: mean over sequences of token means. `seq-mean-token-sum-norm`: the second / `length_norm`.

    Examples:
        >>> values_T, mask_T = torch.tensor([9.0, 1.0, 2.0, 3.0]), torch.tensor([False, True, True, True])
        >>> tokens_T, denominators = torch.tensor([2, 2, 2, 1]), Denominators(num_tokens=3, num_sequences=2)
        >>> aggregate(values_T, mask_T, tokens_T, mode="token-mean", denominators=denominators).item()
        2.0
        >>> aggregate(values_T, mask_T, tokens_T, mode="seq-mean-token-mean", denominators=denominators).item()
        2.25

    Args:
        sequence_tokens_T: token count (`mask_T`) of each token's full sequence, at least 1; the pack may hold a part.
    """
    masked_T = _zero_outside_mask(values_T, mask_T)
    match mode:
        case "token-mean":
            return masked_T.sum() / denominators.num_tokens
        case "seq-mean-token-sum":
            return masked_T.sum() / denominators.num_sequences
        case "seq-mean-token-sum-norm":
            assert length_norm is not None
            return masked_T.sum() / (denominators.num_sequences * length_norm)
        case "seq-mean-token-mean":
            return (masked_T / sequence_tokens_T).sum() / denominators.num_sequences


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp to +-`MAX_LOG_RATIO`, of which `exp` and its square are finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    return clamp_log_ratio(logprobs_T - old_logprobs_T).exp()


def _zero_outside_mask(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """[T] values with 0 outside the mask, even for NaN or infinity."""
    return torch.where(mask_T, values_T, torch.zeros_like(values_T))


MAX_ERROR = 0.2
"""Relative distance from the target is clipped to this in each update."""


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, *, kind: KlKind) -> Tensor:
    """[T] KL estimate per token from d = log pi - log pi_ref: `k1` d, `k2` d^2 / 2, `k3` e^-d - 1 + d.

    Differentiable in `logprobs_T` (Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html).

    Examples:
        >>> kl_penalty(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), kind="k1").tolist()
        [0.5, 0.0]
    """
    log_ratio_T = logprobs_T - ref_logprobs_T
    match kind:
        case "k1":
            return log_ratio_T
        case "k2":
            return log_ratio_T.square() / 2
        case "k3":
            log_ratio_T = clamp_log_ratio(log_ratio_T)
            return torch.expm1(-log_ratio_T) + log_ratio_T


@dataclass(slots=True)
class AdaptiveKl:
    """A KL coefficient that adapts to a target KL (Ziegler et al., arXiv 1909.08593, section 2.2).

    Examples:
        >>> AdaptiveKl().update(kl=0.2, num_samples=256)
        0.00100512
    """

    coefficient: float = 1e-3
    """Current coefficient: the only field that `update` changes."""

    target: float = 0.1
    """Target KL, in the unit of the values passed to `update`."""

    horizon: float = 10_000
    """Number of samples after which a KL far from the target has changed the coefficient by about 20%."""

    def update(self, kl: float, num_samples: int) -> float:
        """Multiply `coefficient` by max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon).."""
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coefficient *= max(1 + error * num_samples / self.horizon, 0.0)
        return self.coefficient


CorrectionKind = Literal["token_tis", "sequence_tis", "icepop", "geometric_mask"]


@dataclass(frozen=True, slots=True)
class CorrectionOutput:
    """Weights of the token losses. Means still divide by the token count of the loss mask, not of `keep_T`.

    Examples:
        >>> ratios_T, sequences = torch.tensor([1.0, 8.0]), Sequences.of(torch.tensor([0, 2]))
        >>> output = rollout_correction(
        ...     ratios_T.log(), torch.zeros(2), torch.tensor([True, True]), sequences, kind="icepop", low=0.5, high=5.0
        ... )
        >>> output.weights_T.tolist(), output.keep_T.tolist()
        ([1.0, 0.0], [True, False])
    """

    weights_T: Tensor
    """[T] weights, detached; 0 where `keep_T` is False."""

    keep_T: Tensor
    """bool [T] loss mask without the tokens that the correction drops."""


@torch.no_grad()
def rollout_correction(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    sequences: Sequences,
    *,
    kind: CorrectionKind,
    low: float,
    high: float,
) -> CorrectionOutput:
    """Weights from the ratio w = pi_old / pi_rollout of trainer to engine probability of each sampled token.

    `token_tis`: min(w, high), truncated importance sampling (fengyao.notion.site/off-policy-rl).
    `sequence_tis`: min(product of w over the sequence, high), on each of its tokens.
    `icepop`: w where low <= w <= high, else 0 (arXiv 2510.18855).
    `geometric_mask`: 1 in sequences whose geometric mean of w is within [low, high], else 0.

    Examples:
        >>> ratios_T, sequences = torch.tensor([0.5, 1.0, 8.0]), Sequences.of(torch.tensor([0, 3]))
        >>> output = rollout_correction(
        ...     ratios_T.log(), torch.zeros(3), torch.ones(3).bool(), sequences, kind="token_tis", low=0.0, high=2.0
        ... )
        >>> output.weights_T.tolist()
        [0.5, 1.0, 2.0]

    Args:
        low: lower bound of `icepop` and `geometric_mask`; the truncating kinds ignore it.
    """
    log_ratio_T = torch.where(mask_T, old_logprobs_T - rollout_logprobs_T, torch.zeros_like(old_logprobs_T))
    match kind:
        case "token_tis":
            weights_T, keep_T = _exp(log_ratio_T).clamp(max=high), mask_T
        case "sequence_tis":
            weights_T, keep_T = sequences.spread(_exp(sequences.sum(log_ratio_T)).clamp(max=high)), mask_T
        case "icepop":
            weights_T = _exp(log_ratio_T)
            keep_T = mask_T & _within(weights_T, low, high)
        case "geometric_mask":
            weights_T = torch.ones_like(log_ratio_T)
            mean_S = _exp(sequences.mean(log_ratio_T, mask_T))
            keep_T = mask_T & sequences.spread(_within(mean_S, low, high))
    return CorrectionOutput(torch.where(keep_T, weights_T, torch.zeros_like(weights_T)), keep_T)


def _exp(log_ratio: Tensor) -> Tensor:
    return clamp_log_ratio(log_ratio).exp()


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)


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
