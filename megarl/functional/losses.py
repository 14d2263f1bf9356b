"""Policy and value losses over packed tokens. Shapes: T packed tokens, S sequences of the pack."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.config.policy import Aggregation
from megarl.functional.sequences import Sequences

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
