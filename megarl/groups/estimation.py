"""What needs a step's tokens and no model: run in a rollout worker's process, which is near them.

Shapes: T tokens of all completions one after another, N completions.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megarl.batch.pack import Column
from megarl.batch.trajectory import Trajectory
from megarl.megatron.requests import Key, TokenColumn
from megarl.workers.payload import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The completions of a step. Entry t is about token t, given those before it."""

    mask_T: Tensor
    """bool [T]: sampled by the policy."""
    cu_seqlens_N: Tensor
    """int64 [N + 1]."""
    rewards_N: Tensor
    """float32 [N]."""
    group_ids_N: Tensor
    """int64 [N]."""
    columns: Mapping[Column, Tensor]
    """float32 [T] each."""

    @property
    def lengths(self) -> Tensor:
        """int64 [N]: sampled tokens."""
        return self.sums(torch.ones_like(self.mask_T, dtype=torch.float32)).long()

    def sums(self, values_T: Tensor) -> Tensor:
        """[N] over each completion's sampled tokens."""
        masked_T = torch.where(self.mask_T, values_T, 0.0).double()
        total_T = torch.cat([masked_T.new_zeros(1), masked_T.cumsum(0)])
        return (total_T[self.cu_seqlens_N[1:]] - total_T[self.cu_seqlens_N[:-1]]).float()

    def at_ends(self, values_N: Tensor) -> Tensor:
        """[T]: each completion's value at its last sampled token, 0 elsewhere."""
        owner_T = torch.repeat_interleave(self.cu_seqlens_N.diff())
        last_N = torch.full((len(values_N),), -1).scatter_reduce(
            0, owner_T[self.mask_T], self.mask_T.nonzero()[:, 0], "amax"
        )
        out_T = torch.zeros(len(self.mask_T))
        sampled_N = last_N >= 0
        out_T[last_N[sampled_N]] = values_N[sampled_N].float()
        return out_T

    def rewards(self, penalty_T: Tensor | None = None) -> Tensor:
        """[T]: each completion's reward at its last sampled token, less the penalty of every sampled one."""
        rewards_T = self.at_ends(self.rewards_N)
        return rewards_T if penalty_T is None else rewards_T - torch.where(self.mask_T, penalty_T, 0.0)

    def totals(self, penalty_T: Tensor | None = None) -> Tensor:
        """[N]: each completion's reward, less the penalty of its sampled tokens."""
        return self.rewards_N if penalty_T is None else self.rewards_N - self.sums(penalty_T)

    def mean(self, values_T: Tensor) -> float:
        """Over all sampled tokens."""
        return float(values_T[self.mask_T].double().mean()) if bool(self.mask_T.any()) else 0.0

    def explained_variance(self, values_T: Tensor, returns_T: Tensor) -> float:
        """1 - Var(returns - values) / Var(returns) over sampled tokens; 0 where all returns are equal."""
        returns_K, values_K = returns_T[self.mask_T].double(), values_T[self.mask_T].double()
        variance = float(returns_K.var(correction=0)) if len(returns_K) else 0.0
        return 1 - float((returns_K - values_K).var(correction=0)) / variance if variance > 0 else 0.0

    def with_advantages(self, advantages_T: Tensor, metrics: Mapping[str, float], **columns: Tensor) -> Estimates:
        """Estimates of them; the completions' means are what people look at.

        Args:
            columns: further ones, by name.
        """
        advantages_T = torch.where(self.mask_T, advantages_T, 0.0)
        means_N = self.sums(advantages_T) / self.lengths.clamp(min=1)
        found: dict[Column, Tensor] = {"advantages": advantages_T}
        for name, column_T in columns.items():
            found[cast("Column", name)] = column_T
        return Estimates(columns=found, scalars={"advantages": means_N}, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What was found out about a step's completions."""

    columns: Mapping[Column, Tensor] = field(default_factory=dict)
    """float32 [T] each."""
    scalars: Mapping[Column, Tensor] = field(default_factory=dict)
    """[N] each."""
    metrics: Mapping[str, float] = field(default_factory=dict)


Estimator = Callable[..., Estimates]
"""`(tokens: StepTokens, *arguments) -> Estimates`, a function of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateJob:
    """What a rollout worker is to compute."""

    estimator: Estimator
    arguments: tuple[Any, ...]
    rewards: tuple[float, ...]
    """[N]."""
    columns: Mapping[Column, Payload[TokenColumn]]
    gives: tuple[Column, ...]
    """Columns that the estimator gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the controller reads of `Estimates`."""

    scalars: Mapping[Column, list[float]]
    metrics: Mapping[str, float]


def estimate(job: EstimateJob, groups: Sequence[Sequence[Trajectory]]) -> tuple[Findings, list[TokenColumn]]:
    """The numbers, and the columns of `job.gives` in the form in which they travel."""
    keys = [(p, i) for p, group in enumerate(groups) for i in range(len(group))]
    columns = {name: _concatenated(payload.fetch(), keys) for name, payload in job.columns.items()}
    tokens = step_tokens(groups, job.rewards, columns)
    found = job.estimator(tokens, *job.arguments)
    scalars: dict[Column, list[float]] = {name: values_N.tolist() for name, values_N in found.scalars.items()}
    bounds = tokens.cu_seqlens_N.tolist()
    given: list[TokenColumn] = []
    for name in job.gives:
        whole = found.columns[name].float().numpy()
        given.append([{key: whole[a:b] for key, a, b in zip(keys, bounds, bounds[1:], strict=False)}])
    return Findings(scalars=scalars, metrics=found.metrics), given


def step_tokens(
    groups: Sequence[Sequence[Trajectory]], rewards: Sequence[float], columns: Mapping[Column, Tensor]
) -> StepTokens:
    """All trajectories of the groups."""
    trajectories = [trajectory for group in groups for trajectory in group]
    return StepTokens(
        mask_T=torch.from_numpy(np.concatenate([t.loss_mask for t in trajectories])),
        cu_seqlens_N=torch.tensor([0, *np.cumsum([t.num_tokens for t in trajectories])]),
        rewards_N=torch.tensor(rewards, dtype=torch.float32),
        group_ids_N=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        columns=columns,
    )


def _concatenated(column: TokenColumn, keys: Sequence[Key]) -> Tensor:
    merged = ChainMap(*map(dict, column))
    return torch.from_numpy(np.concatenate([merged[key] for key in keys]))
