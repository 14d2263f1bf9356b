"""The trajectories and columns of a training step, fetched to a trainer rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.pack import ColumnName, PerToken, SampleKey, SampleRef, SampleTable
from megarl.batch.trajectory import ROUTES, Routes, Trajectory, find_mixed_kv, is_routed
from megarl.cluster.workers.dispatch import LocalPayload, Payload, fetch_all
from megarl.megatron.requests import ForwardRequest, MiniBatch, TokenColumn, TrainRequest, Trajectories, VersionRange


@dataclass(frozen=True, slots=True)
class ComputedColumn:
    """A column whose parts are stored where they were computed; satisfies `Payload[TokenColumn]`."""

    refs: tuple[Any, ...]
    """One ray.ObjectRef of a part, a mapping from sample keys to values, per replica that has computed one."""
    sorted_keys_N: NDArray[np.int64]
    """Keys of the N samples as single numbers, ascending."""
    parts_N: NDArray[np.int64]
    """Index in `refs` of the part that holds each of them."""

    @classmethod
    def of(cls, refs: Sequence[Any], keys: Sequence[NDArray[np.int64]]) -> ComputedColumn:
        """Return the column; `keys`: those of the samples of each part, [n, 2]."""
        keys_N = _as_numbers(np.concatenate(keys))
        parts_N = np.repeat(np.arange(len(keys)), [len(of_part) for of_part in keys])
        order_N = np.argsort(keys_N, kind="stable")
        return cls(tuple(refs), keys_N[order_N], parts_N[order_N])

    def select(self, keys_N2: NDArray[np.int64]) -> ComputedColumn:
        """Return the column with the parts only that hold a sample of these keys."""
        found_N = np.searchsorted(self.sorted_keys_N, np.unique(_as_numbers(keys_N2)))
        parts_P, parts_N = np.unique(self.parts_N[found_N], return_inverse=True)
        refs = tuple(self.refs[part] for part in parts_P.tolist())
        return ComputedColumn(refs, self.sorted_keys_N[found_N], parts_N)

    def find_parts(self, keys_N2: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index in `refs` of the part that holds each of these samples, [N]."""
        return self.parts_N[np.searchsorted(self.sorted_keys_N, _as_numbers(keys_N2))]

    def load(self, values: Sequence[dict[SampleKey, PerToken]]) -> TokenColumn:
        """Return the parts, one for each of `refs`."""
        return tuple(values)

    def fetch(self) -> TokenColumn:
        """Return the parts; their arrays are read-only."""
        return fetch_all([self])[0]


def _as_numbers(keys_N2: NDArray[np.int64]) -> NDArray[np.int64]:
    numbers_N: NDArray[np.int64] = (keys_N2[:, 0] << 32) + keys_N2[:, 1]
    return numbers_N


def merge_column(parts: TokenColumn) -> dict[SampleKey, PerToken]:
    """Return the values of all parts by sample key."""
    merged: dict[SampleKey, PerToken] = {}
    for part in parts:
        merged.update(part)
    return merged


def select_values(column: Payload[TokenColumn], keys_N2: NDArray[np.int64]) -> Payload[TokenColumn]:
    """Return the part of a column that holds the values of these samples, as far as its storage allows."""
    if isinstance(column, ComputedColumn):
        return column.select(keys_N2)
    if isinstance(column, LocalPayload):
        keys = set(map(tuple, keys_N2.tolist()))
        parts = [{key: part[key] for key in keys & part.keys()} for part in column.value]
        return LocalPayload([part for part in parts if part])
    return column


def select_samples(payload: Payload[Trajectories], indices: NDArray[np.int64]) -> Payload[Trajectories]:
    """Return the trajectories of a payload at these indices, by index; a stored payload is fetched as a whole."""
    if isinstance(payload, LocalPayload):
        return LocalPayload({i: payload.value[i] for i in indices.tolist()})
    return payload


def count_routed(trajectory: Trajectory) -> tuple[int, int]:
    """Return how many tokens have a route, and how many tokens there are, before the last trained token."""
    trained_T = np.flatnonzero(trajectory.loss_mask)
    num = int(trained_T[-1]) if len(trained_T) else 0
    return (0 if trajectory.routes is None else int(is_routed(trajectory.routes[:num]).sum())), num


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
    routes: Mapping[SampleKey, Routes] | None = None
    """Routes of all samples; None: none are given."""

    @classmethod
    def fetch(cls, request: TrainRequest) -> StepSamples:
        """Fetch all payloads and columns of the request in one call."""
        by_index, names = payloads_by_index(request), list(request.columns)
        wanted: list[Payload[Any]] = [*by_index.values(), *request.columns.values()]
        values = fetch_all(wanted)
        columns = dict(zip(names, map(merge_column, values[len(by_index) :]), strict=True))
        routes = columns.pop(ROUTES, None)
        return cls(dict(zip(by_index, values, strict=False)), columns, request.versions, routes)

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
