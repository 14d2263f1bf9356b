"""What a loss is: a frozen dataclass that is called with a pack's scores and returns the pack's share of the loss.

The controller creates losses and sends them to the trainer ranks, pickled by reference to their class. Each rank calls
them once per micro-batch.

Shapes: T packed tokens of this rank, S sequences of the pack. Entry t refers to the token that position t predicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.batch.pack import ColumnName, PackedBatch
from megarl.functional import Denominators, PolicyLossOutput, Sequences, aggregate


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
