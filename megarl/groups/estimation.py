"""Advantage estimation: computations on a step's tokens that need no model.

They run in the process of a rollout worker, where the tokens are. Shapes: N completions (episodes), whose T tokens
(prompts included) are concatenated; those of the segments of an episode follow one another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from megarl.batch.pack import ColumnName
from megarl.batch.sample_table import SampleKey
from megarl.batch.trajectory import Trajectory, split_episodes
from megarl.functional import turn_advantages, turn_of_tokens
from megarl.functional.advantages import GroupBaseline
from megarl.megatron.requests import TokenColumn
from megarl.megatron.token_column import merge_column
from megarl.workers.payload import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The completions of a step, packed. Entry t of a column refers to token t given the tokens before it."""

    mask_T: Tensor
    """bool [T]: True where the policy sampled the token."""
    cu_seqlens_N: Tensor
    """int64 [N + 1]: offsets of the completions."""
    rewards_N: Tensor
    """float32 [N]: reward of each completion."""
    group_ids_N: Tensor
    """int64 [N]: index of each completion's group."""
    columns: Mapping[ColumnName, Tensor]
    """Values per token by name, float32 [T] each."""
    turn_rewards_T: Tensor | None = None
    """Rewards of turns at their last token, 0 elsewhere, float32 [T]; they sum to `rewards_N`, as what the environment
    did not give for a turn is at the last one. None: advantages are per episode."""

    @property
    def lengths(self) -> Tensor:
        """Number of sampled tokens of each completion, int64 [N]."""
        return self.sequence_sums(torch.ones_like(self.mask_T, dtype=torch.float32)).long()

    def sequence_sums(self, values_T: Tensor) -> Tensor:
        """Return the sum over the sampled tokens of each completion, float32 [N]."""
        masked_T = torch.where(self.mask_T, values_T, 0.0).double()
        total_T = torch.cat([masked_T.new_zeros(1), masked_T.cumsum(0)])
        return (total_T[self.cu_seqlens_N[1:]] - total_T[self.cu_seqlens_N[:-1]]).float()

    def at_last_token(self, values_N: Tensor) -> Tensor:
        """Return [T] values: each completion's value at its last sampled token, 0 elsewhere."""
        owner_T = torch.repeat_interleave(self.cu_seqlens_N.diff())
        last_N = torch.full((len(values_N),), -1).scatter_reduce(
            0, owner_T[self.mask_T], self.mask_T.nonzero()[:, 0], "amax"
        )
        out_T = torch.zeros(len(self.mask_T))
        sampled_N = last_N >= 0
        out_T[last_N[sampled_N]] = values_N[sampled_N].float()
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
        episode_K = torch.repeat_interleave(self.cu_seqlens_N.diff())[self.mask_T]
        num_turns = int(turn_K[-1]) + 1 if len(turn_K) else 0
        rewards_M = torch.zeros(num_turns, dtype=torch.double).index_add_(0, turn_K, rewards_K.double())
        episode_M = torch.zeros(num_turns, dtype=torch.long).index_put_((turn_K,), episode_K)
        advantages_M = turn_advantages(rewards_M, episode_M, self.group_ids_N, kind=kind)
        return torch.where(self.mask_T, torch.cat([advantages_M, advantages_M.new_zeros(1)])[turn_T], 0.0)

    def masked_mean(self, values_T: Tensor) -> float:
        """Return the mean over all sampled tokens; 0 if there are none."""
        return float(values_T[self.mask_T].double().mean()) if bool(self.mask_T.any()) else 0.0

    def explained_variance(self, values_T: Tensor, returns_T: Tensor) -> float:
        """Return 1 - Var(returns - values) / Var(returns) over sampled tokens; 0 if all returns are equal."""
        returns_K, values_K = returns_T[self.mask_T].double(), values_T[self.mask_T].double()
        variance = float(returns_K.var(correction=0)) if len(returns_K) else 0.0
        return 1 - float((returns_K - values_K).var(correction=0)) / variance if variance > 0 else 0.0

    def with_advantages(self, advantages_T: Tensor, metrics: Mapping[str, float], **columns: Tensor) -> EstimatorOutput:
        """Return an output with the advantages (0 at tokens that were not sampled) and their mean per completion.

        Args:
            columns: further columns of the output by name, [T] each.
        """
        advantages_T = torch.where(self.mask_T, advantages_T, 0.0)
        means_N = self.sequence_sums(advantages_T) / self.lengths.clamp(min=1)
        found = {"advantages": advantages_T, **columns}
        return EstimatorOutput(columns=found, scalars={"advantages": means_N}, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorOutput:
    """Result of an estimator for the completions of a step."""

    columns: Mapping[ColumnName, Tensor] = field(default_factory=dict)
    """Values per token by name, float32 [T] each."""
    scalars: Mapping[ColumnName, Tensor] = field(default_factory=dict)
    """Values per completion by name, [N] each."""
    metrics: Mapping[str, float] = field(default_factory=dict)


Estimator = Callable[..., EstimatorOutput]
"""Module-level function `(tokens: TokenBatch, *arguments) -> EstimatorOutput`; sent to workers by reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateJob:
    """An estimator call for a rollout worker."""

    estimator: Estimator
    arguments: tuple[object, ...]
    keys: tuple[SampleKey, ...]
    """The sequences of the N completions to estimate, group after group; the groups may have others, which are dropped.
    Sequences that continue an episode follow its first one."""
    rewards: tuple[float, ...]
    """Reward of each completion, N values."""
    columns: Mapping[ColumnName, Payload[TokenColumn]]
    outputs: tuple[ColumnName, ...]
    """Names of the columns of `EstimatorOutput` to return."""
    turn_weight: float | None = None
    """Weight of the environment's rewards in `rewards`, if advantages are per turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateSummary:
    """The part of `EstimatorOutput` that is sent to the controller: values per completion and metrics."""

    scalars: Mapping[ColumnName, list[float]]
    metrics: Mapping[str, float]


def estimate(job: EstimateJob, groups: Sequence[Sequence[Trajectory]]) -> tuple[EstimateSummary, list[TokenColumn]]:
    """Run the estimator; return the summary for the controller and the columns of `job.outputs` as `TokenColumn`s."""
    keys = job.keys
    columns = {name: _concatenate(payload.fetch(), keys) for name, payload in job.columns.items()}
    kept = [[groups[p][i] for p, i in members] for _, members in itertools.groupby(keys, key=itemgetter(0))]
    tokens = make_token_batch(kept, job.rewards, columns, turn_weight=job.turn_weight)
    output = job.estimator(tokens, *job.arguments)
    scalars: dict[ColumnName, list[float]] = {name: values_N.tolist() for name, values_N in output.scalars.items()}
    bounds = np.cumsum([0, *(trajectory.num_tokens for group in kept for trajectory in group)]).tolist()
    columns_out: list[TokenColumn] = []
    for name in job.outputs:
        values = output.columns[name].float().numpy()
        columns_out.append([{key: values[a:b] for key, a, b in zip(keys, bounds, bounds[1:], strict=False)}])
    return EstimateSummary(scalars=scalars, metrics=output.metrics), columns_out


def make_token_batch(
    groups: Sequence[Sequence[Trajectory]],
    rewards: Sequence[float],
    columns: Mapping[ColumnName, Tensor],
    *,
    turn_weight: float | None = None,
) -> TokenBatch:
    """Concatenate all trajectories of the groups, in order, into one batch.

    Args:
        rewards: one per episode.
        columns: float32 [T] each.
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


def _concatenate(column: TokenColumn, keys: Sequence[SampleKey]) -> Tensor:
    merged = merge_column(column)
    return torch.from_numpy(np.concatenate([merged[key] for key in keys]))
