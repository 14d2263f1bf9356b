"""The trajectories of a controller step, and what is known of them, as a trainer's rank finds them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.batch.pack import Column, PerToken
from megarl.batch.trajectory import Trajectory
from megarl.megatron.requests import Key, MiniBatch, SampleRef, TrainWork


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step's samples refer to."""

    trajectories: Sequence[Sequence[Trajectory]]
    """[payload][index]."""
    columns: Mapping[Column, Mapping[Key, PerToken]]

    @classmethod
    def fetch(cls, work: TrainWork) -> Samples:
        """All that the work names."""
        return cls(
            [payload.fetch() for payload in work.payloads],
            {name: dict(ChainMap(*map(dict, column.fetch()))) for name, column in work.columns.items()},
        )

    def trajectory(self, ref: SampleRef) -> Trajectory:
        """Of one sample."""
        return self.trajectories[ref.payload][ref.index]

    def column(self, name: Column, ref: SampleRef) -> float | PerToken:
        """Of one sample: token by token, or the same for all."""
        return self.columns[name][ref.key] if name in self.columns else ref.scalars[name]

    def names(self, batch: MiniBatch) -> list[Column]:
        """What is known of the mini-batch's samples beside their trajectories, sorted."""
        return sorted({*self.columns, *(name for ref in batch.samples for name in ref.scalars)})
