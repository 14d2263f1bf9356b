"""Advantage estimation: what estimators are given and return. They are computations on tokens that need no model.

They run in the processes of the rollout workers, where the tokens are, see `estimate_job`; those that need no tokens,
in the controller. Shapes: N completions (episodes), whose T tokens (prompts included) are concatenated; those of the
segments of an episode follow one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self, override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.batch.pack import ColumnName
from megarl.batch.trajectory import Trajectory, split_episodes
from megarl.config.policy import KlRewardConfig, PolicyConfig
from megarl.functional import AdaptiveKl, GroupMoments, kl_penalty, turn_advantages, turn_of_tokens
from megarl.functional.advantages import GroupBaseline


@dataclass(frozen=True, slots=True)
class OfGroups:
    """What is computed from the moments of the groups of a step, which are the fields of its subclasses."""

    @classmethod
    def merge(cls, parts: Sequence[Self], order: NDArray[np.int64]) -> Self:
        """Return the same for the groups of all parts, the i-th of which is number `order[i]` of them.

        Fields that are no moments are those of the first part.
        """
        merged = {
            name: GroupMoments.concatenate((getattr(part, name) for part in parts), order)
            for name in (each.name for each in fields(cls))
            if isinstance(getattr(parts[0], name), GroupMoments)
        }
        return replace(parts[0], **merged)


class GroupedMetric(OfGroups, ABC):
    """A metric of a step, made of parts that depend on one group each."""

    __slots__ = ()

    @property
    @abstractmethod
    def value(self) -> float:
        """The metric of all groups."""


Metric = float | GroupedMetric


@dataclass(frozen=True, slots=True)
class MeanMetric(GroupedMetric):
    """A mean over tokens or completions."""

    moments: GroupMoments

    @property
    @override
    def value(self) -> float:
        """The mean; 0 over nothing."""
        return self.moments.mean


@dataclass(frozen=True, slots=True)
class ExplainedVariance(GroupedMetric):
    """The share of the variance of returns that a critic's values explain."""

    residuals: GroupMoments
    """Of the returns minus the values."""
    returns: GroupMoments

    @property
    @override
    def value(self) -> float:
        """1 - Var(residuals) / Var(returns); 0 if all returns are equal."""
        variance = self.returns.variance()
        return 1 - self.residuals.variance() / variance if variance > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Whitening(OfGroups):
    """Division of the advantages, minus their mean, by their standard deviation over all sampled tokens of a step."""

    moments: GroupMoments
    """Of the advantages of the sampled tokens."""
    unbiased: bool
    """Whether the variance divides by n - 1; see `megarl.functional.whiten`."""

    @property
    def mean(self) -> float:
        """The mean of the advantages."""
        return self.moments.mean

    @property
    def variance(self) -> float:
        """The variance of the advantages, biased or not."""
        return self.moments.variance(unbiased=self.unbiased)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBatch:
    """The scalars of the completions of a step, or of some of its groups.

    Examples:
        >>> batch = CompletionBatch.of([1.0, 0.0], [0, 0], scalars={})
        >>> (batch.rewards_N - batch.rewards_N.mean()).tolist()
        [0.5, -0.5]
    """

    rewards_N: Tensor
    """float32 [N]: reward of each completion."""
    group_ids_N: Tensor
    """int64 [N]: index of each completion's group, ascending from 0."""
    scalars: Mapping[ColumnName, Tensor] = field(default_factory=dict)
    """Values per completion by name, those of `RolloutBatch.scalars`, float32 [N] each."""

    @classmethod
    def of(
        cls, rewards: Sequence[float], group_ids: Sequence[int], scalars: Mapping[ColumnName, Tensor]
    ) -> CompletionBatch:
        """Return the batch of completions with these rewards and groups."""
        return cls(
            rewards_N=torch.tensor(rewards, dtype=torch.float32), group_ids_N=torch.tensor(group_ids), scalars=scalars
        )

    def completion_mean(self, values_N: Tensor) -> MeanMetric:
        """Return the mean over all completions of the step, as a metric."""
        return MeanMetric(GroupMoments.of(values_N, self.group_ids_N, self._num_groups))

    @property
    def _num_groups(self) -> int:
        return int(self.group_ids_N[-1]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(CompletionBatch):
    """Completions of a step, or of some of its groups, packed.

    Entry t of a column refers to token t given the tokens before it.

    Examples:
        >>> tokens = TokenBatch(
        ...     mask_T=torch.tensor([False, True, True]),
        ...     cu_seqlens_N=torch.tensor([0, 3]),
        ...     rewards_N=torch.tensor([1.0]),
        ...     group_ids_N=torch.tensor([0]),
        ...     columns={"values": torch.tensor([0.0, 0.25, 0.5])},
        ... )
        >>> tokens.token_rewards().tolist(), tokens.sequence_sums(tokens.columns["values"]).tolist()
        ([0.0, 0.0, 1.0], [0.75])
    """

    mask_T: Tensor
    """bool [T]: True where the policy sampled the token."""
    cu_seqlens_N: Tensor
    """int64 [N + 1]: offsets of the completions."""
    columns: Mapping[ColumnName, Tensor]
    """Values per token by name, float32 [T] each."""
    turn_rewards_T: Tensor | None = None
    """Rewards of turns at their last token, 0 elsewhere, float32 [T]; they sum to `rewards_N`, as what the environment
    did not give for a turn is at the last one. None: advantages are per episode."""

    @property
    def lengths(self) -> Tensor:
        """Number of sampled tokens of each completion, int64 [N]."""
        before_T = torch.cat([torch.zeros(1, dtype=torch.long), self.mask_T.cumsum(0)])
        return before_T[self.cu_seqlens_N].diff()

    @property
    def _owners_of_sampled(self) -> Tensor:
        """Index of the completion of each sampled token, in their order."""
        return torch.repeat_interleave(self.lengths)

    def sequence_sums(self, values_T: Tensor) -> Tensor:
        """Return the sum over the sampled tokens of each completion, float32 [N]."""
        values_K = values_T[self.mask_T].double()
        return torch.bincount(self._owners_of_sampled, values_K, len(self.cu_seqlens_N) - 1).float()

    def at_last_token(self, values_N: Tensor) -> Tensor:
        """Return [T] values: each completion's value at its last sampled token, 0 elsewhere."""
        lengths_N = self.lengths
        sampled_N = lengths_N > 0
        last_N = self.mask_T.nonzero()[lengths_N.cumsum(0)[sampled_N] - 1, 0]
        out_T = torch.zeros(len(self.mask_T))
        out_T[last_N] = values_N[sampled_N].float()
        return out_T

    def token_rewards(self, penalty_T: Tensor | None = None) -> Tensor:
        """Return [T] rewards: a completion's reward at its last sampled token, minus the penalty at sampled tokens.

        With advantages per turn, the reward of a turn is at the last token of the turn.
        """
        rewards_T = self.at_last_token(self.rewards_N) if self.turn_rewards_T is None else self.turn_rewards_T
        return rewards_T if penalty_T is None else rewards_T - torch.where(self.mask_T, penalty_T, 0.0)

    def sequence_rewards(self, penalty_T: Tensor | None = None) -> Tensor:
        """Return [N] rewards: each completion's reward minus the sum of the penalty over its sampled tokens."""
        return self.rewards_N if penalty_T is None else self.rewards_N - self.sequence_sums(penalty_T)

    def turn_advantages(self, kind: GroupBaseline, penalty_T: Tensor | None = None) -> Tensor:
        """Return `turn_advantages` of the rewards of turns minus the penalty, at the tokens of each turn, [T]."""
        turn_T = turn_of_tokens(self.mask_T)
        turn_K, rewards_K = turn_T[self.mask_T], self.token_rewards(penalty_T)[self.mask_T]
        episode_K = self._owners_of_sampled
        num_turns = int(turn_K[-1]) + 1 if len(turn_K) else 0
        rewards_M = torch.zeros(num_turns, dtype=torch.double).index_add_(0, turn_K, rewards_K.double())
        episode_M = torch.zeros(num_turns, dtype=torch.long).index_put_((turn_K,), episode_K)
        advantages_M = turn_advantages(rewards_M, episode_M, self.group_ids_N, kind=kind)
        return torch.where(self.mask_T, torch.cat([advantages_M, advantages_M.new_zeros(1)])[turn_T], 0.0)

    def token_mean(self, values_T: Tensor) -> MeanMetric:
        """Return the mean over all sampled tokens of the step, as a metric; 0 if there are none."""
        return MeanMetric(self._token_moments(values_T))

    def explained_variance(self, values_T: Tensor, returns_T: Tensor) -> ExplainedVariance:
        """Return 1 - Var(returns - values) / Var(returns) over the sampled tokens of the step, as a metric."""
        returns_T = returns_T.double()
        return ExplainedVariance(self._token_moments(returns_T - values_T), self._token_moments(returns_T))

    def with_advantages(
        self,
        advantages_T: Tensor,
        metrics: Mapping[str, Metric],
        *,
        whiten: bool = False,
        unbiased: bool = False,
        **columns: Tensor,
    ) -> EstimatorOutput:
        """Return an output with the advantages (0 at tokens that were not sampled) and their mean per completion.

        Args:
            whiten: whether the advantages are whitened over all sampled tokens of the step.
            unbiased: see `megarl.functional.whiten`.
            columns: further columns of the output by name, [T] each.
        """
        advantages_T = torch.where(self.mask_T, advantages_T, 0.0)
        found = {"advantages": advantages_T, **columns}
        if whiten:
            whitening = Whitening(self._token_moments(advantages_T), unbiased)
            return EstimatorOutput(columns=found, metrics=metrics, whitening=whitening)
        return EstimatorOutput(
            columns=found, scalars={"advantages": self.sequence_means(advantages_T)}, metrics=metrics
        )

    def sequence_means(self, values_T: Tensor) -> Tensor:
        """Return the mean over the sampled tokens of each completion, float32 [N]; 0 without any."""
        return self.sequence_sums(values_T) / self.lengths.clamp(min=1)

    def _token_moments(self, values_T: Tensor) -> GroupMoments:
        return GroupMoments.of(values_T[self.mask_T], self.group_ids_N[self._owners_of_sampled], self._num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorOutput:
    """Result of an estimator for the completions that it was given.

    Examples:
        >>> EstimatorOutput(scalars={"advantages": torch.tensor([0.5, -0.5])}).scalars["advantages"].tolist()
        [0.5, -0.5]
    """

    columns: Mapping[ColumnName, Tensor] = field(default_factory=dict)
    """Values per token by name, float32 [T] each."""
    scalars: Mapping[ColumnName, Tensor] = field(default_factory=dict)
    """Values per completion by name, [N] each."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """By name. Of an estimator with `by_groups`, all are `GroupedMetric`s: a number would be of some groups only."""
    whitening: Whitening | None = None
    """How the column `advantages` is whitened, after which the scalar `advantages` is computed; None: not at all."""


Estimator = Callable[..., EstimatorOutput]
"""Module-level function `(tokens: TokenBatch, *arguments) -> EstimatorOutput`; sent to workers by reference.

One with `by_completions` has `(batch: CompletionBatch, *arguments)`.
"""


def by_groups[E: Estimator](estimator: E) -> E:
    """Mark an estimator whose values for a group depend on that group only; return it.

    The workers share the groups of a step: each calls the estimator with some of them. Without the mark, one worker
    calls it with all.

    Examples:
        >>> @by_groups
        ... def centred(batch: TokenBatch) -> EstimatorOutput:
        ...     moments = GroupMoments.of(batch.rewards_N, batch.group_ids_N, int(batch.group_ids_N[-1]) + 1)
        ...     mean_N = torch.from_numpy(moments.mean_G)[batch.group_ids_N]
        ...     return EstimatorOutput(scalars={"advantages": batch.rewards_N - mean_N})
        >>> is_by_groups(centred)
        True
    """
    setattr(estimator, _BY_GROUPS, True)
    return estimator


def is_by_groups(estimator: Estimator) -> bool:
    """Return whether the estimator is marked with `by_groups`."""
    return getattr(estimator, _BY_GROUPS, False)


def by_completions[E: Estimator](estimator: E) -> E:
    """Mark an estimator that reads tokens only for the KL penalty in rewards and for rewards of turns; return it.

    In a step without either, the controller calls it with a `CompletionBatch` of all groups; otherwise workers call it
    with a `TokenBatch`.

    Examples:
        >>> @by_completions
        ... def rewards_themselves(batch: CompletionBatch) -> EstimatorOutput:
        ...     return EstimatorOutput(scalars={"advantages": batch.rewards_N})
        >>> rewards_themselves(CompletionBatch.of([1.0, 0.0], [0, 0], {})).scalars["advantages"].tolist()
        [1.0, 0.0]
    """
    setattr(estimator, _BY_COMPLETIONS, True)
    return estimator


def is_by_completions(estimator: Estimator) -> bool:
    """Return whether the estimator is marked with `by_completions`."""
    return getattr(estimator, _BY_COMPLETIONS, False)


_BY_GROUPS, _BY_COMPLETIONS = "estimates_by_groups", "estimates_by_completions"


def make_token_batch(
    groups: Sequence[Sequence[Trajectory]],
    rewards: Sequence[float],
    columns: Mapping[ColumnName, Tensor],
    scalars: Mapping[ColumnName, Tensor] | None = None,
    *,
    turn_weight: float | None = None,
) -> TokenBatch:
    """Concatenate all trajectories of the groups, in order, into one batch.

    Args:
        rewards: one per episode.
        columns: float32 [T] each.
        scalars: float32 [N] each; None: none.
        turn_weight: weight of the rewards of turns; None: advantages are per episode.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    episodes = split_episodes(trajectories)
    tokens = TokenBatch(
        mask_T=torch.from_numpy(np.concatenate([t.loss_mask for t in trajectories])),
        cu_seqlens_N=torch.tensor([0, *np.cumsum([sum(t.num_tokens for t in segments) for segments in episodes])]),
        rewards_N=torch.tensor(rewards, dtype=torch.float32),
        group_ids_N=torch.tensor([g for g, group in enumerate(groups) for t in group if t.segment == 0]),
        columns=columns,
        scalars=scalars or {},
    )
    return (
        tokens if turn_weight is None else replace(tokens, turn_rewards_T=_turn_rewards(tokens, episodes, turn_weight))
    )


def _turn_rewards(tokens: TokenBatch, episodes: Sequence[Sequence[Trajectory]], weight: float) -> Tensor:
    """Return the rewards of turns at their last tokens, [T]; what an episode has above their sum is at its last one."""
    parts = []
    for segments in episodes:
        for segment in segments:
            rewards_t = np.zeros(segment.num_tokens)
            ends = np.flatnonzero(segment.loss_mask & ~np.append(segment.loss_mask[1:], False))
            if segment.turn_rewards:
                rewards_t[ends] = weight * np.array(segment.turn_rewards)
            parts.append(rewards_t)
    given_T = torch.from_numpy(np.concatenate(parts))
    rest_N = tokens.rewards_N.double() - tokens.sequence_sums(given_T).double()
    return (given_T + tokens.at_last_token(rest_N).double()).float()


KL_METRIC = "kl/reference"
"""Metric name: mean KL estimate per token, before the coefficient."""


def reward_kl_penalty(
    tokens: TokenBatch, algorithm: PolicyConfig, kl_coefficient: float
) -> tuple[Tensor | None, dict[str, Metric]]:
    """Return the [T] penalty of each token, or None without `kl_reward`, and its metrics."""
    if algorithm.kl_reward is None:
        return None, {}
    logprobs_T, ref_logprobs_T = tokens.columns["old_logprobs"], tokens.columns["ref_logprobs"]
    kl_T = kl_penalty(logprobs_T, ref_logprobs_T, kind=algorithm.kl_reward.kind)
    return kl_coefficient * kl_T, {KL_METRIC: tokens.token_mean(kl_T)}


def make_adaptive_kl(config: KlRewardConfig | None) -> AdaptiveKl | None:
    """Return the coefficient of the penalty, which moves if `config` has a target; None without a penalty."""
    if config is None:
        return None
    return AdaptiveKl(coefficient=config.coefficient, target=config.target or 1.0, horizon=config.horizon)
