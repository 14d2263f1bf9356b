"""The trajectories and columns of a training step, fetched to a trainer rank."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.batch.pack import ColumnName, PerToken
from megarl.batch.trajectory import Trajectory
from megarl.megatron.requests import MiniBatch, SampleKey, SampleRef, TrainRequest


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The data that the `SampleRef`s of a training step refer to."""

    trajectories: Sequence[Sequence[Trajectory]]
    """The trajectories, indexed by [payload][index]."""
    columns: Mapping[ColumnName, Mapping[SampleKey, PerToken]]
    """Per-token columns by name, [num_tokens] for each sample."""

    @classmethod
    def fetch(cls, request: TrainRequest) -> StepSamples:
        """Fetch all payloads and columns of the request."""
        return cls(
            [payload.fetch() for payload in request.payloads],
            {name: dict(ChainMap(*map(dict, column.fetch()))) for name, column in request.columns.items()},
        )

    def trajectory(self, ref: SampleRef) -> Trajectory:
        """Return the trajectory of one sample."""
        return self.trajectories[ref.payload][ref.index]

    def column(self, name: ColumnName, ref: SampleRef) -> float | PerToken:
        """Return a column of one sample: per token [num_tokens], or one value for the whole sequence."""
        return self.columns[name][ref.key] if name in self.columns else ref.scalars[name]

    def column_names(self, batch: MiniBatch) -> list[ColumnName]:
        """Return the names of all columns of the mini-batch's samples, sorted."""
        return sorted({*self.columns, *(name for ref in batch.samples for name in ref.scalars)})
