"""The trajectories and columns of a training step, fetched to a trainer rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.batch.pack import ColumnName, PerToken
from megarl.batch.sample_table import SampleKey, SampleRef, SampleTable
from megarl.batch.trajectory import Trajectory, find_mixed_kv
from megarl.megatron.requests import ForwardRequest, MiniBatch, TrainRequest, Trajectories, VersionRange
from megarl.megatron.token_column import merge_column
from megarl.workers.payload import Payload, fetch_all

POLICY_VERSIONS: ColumnName = "policy_versions"
"""Column of packs: the version that sampled each token, -1 if with the KV cache of older weights; exact in float32 up
to version 2^24."""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The data that the `SampleRef`s of a training step refer to."""

    trajectories: Mapping[int, Trajectories]
    """The trajectories, indexed by [payload][index]."""
    columns: Mapping[ColumnName, Mapping[SampleKey, PerToken]]
    """Per-token columns by name, [num_tokens] for each sample."""
    versions: VersionRange | None = None
    """As in the request."""

    @classmethod
    def fetch(cls, request: TrainRequest) -> StepSamples:
        """Fetch all payloads and columns of the request in one call."""
        by_index, names = payloads_by_index(request), list(request.columns)
        wanted: list[Payload[Any]] = [*by_index.values(), *request.columns.values()]
        values = fetch_all(wanted)
        columns = map(merge_column, values[len(by_index) :])
        return cls(dict(zip(by_index, values, strict=False)), dict(zip(names, columns, strict=True)), request.versions)

    def trajectory(self, ref: SampleRef) -> Trajectory:
        """Return the trajectory of one sample, whose loss mask leaves tokens of too old versions out."""
        trajectory = self.trajectories[ref.payload][ref.index]
        if self.versions is None:
            return trajectory
        return replace(
            trajectory, loss_mask=trajectory.loss_mask & (trajectory.policy_versions >= self.versions.oldest)
        )

    def pack_columns(self, batch: MiniBatch, refs: Sequence[SampleRef]) -> dict[ColumnName, list[float | PerToken]]:
        """Return the columns of these samples of the mini-batch, and their policy versions where these may differ."""
        columns = {name: [self.column(name, ref) for ref in refs] for name in self.column_names(batch)}
        if self.versions is not None:
            columns[POLICY_VERSIONS] = [self._versions(self.trajectory(ref), self.versions) for ref in refs]
        return columns

    def _versions(self, trajectory: Trajectory, versions: VersionRange) -> PerToken:
        mixed_T = find_mixed_kv(trajectory.loss_mask, trajectory.policy_versions) & versions.in_place
        return np.where(mixed_T, -1, trajectory.policy_versions).astype(np.float32)

    def column(self, name: ColumnName, ref: SampleRef) -> float | PerToken:
        """Return a column of one sample: per token [num_tokens], or one value for the whole sequence."""
        return self.columns[name][ref.key] if name in self.columns else ref.scalars[name]

    def column_names(self, batch: MiniBatch) -> list[ColumnName]:
        """Return the names of all columns of the mini-batch's samples, sorted."""
        return sorted({*self.columns, *SampleTable.of(batch.samples).scalars})


def payloads_by_index(request: TrainRequest | ForwardRequest) -> dict[int, Payload[Trajectories]]:
    """Return the payloads of a request by their index."""
    payloads = request.payloads
    return dict(payloads.items() if isinstance(payloads, Mapping) else enumerate(payloads))
