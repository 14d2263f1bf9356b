"""The samples of one data-parallel replica in a few large arrays, which its ranks read from shared memory.

    controller -- request with references --> first rank of a replica: `pack_samples`
                                                     |
                        ranks of the replica <-- request with arrays (one object, read without a copy)

A rank that fetched each group by itself would handle dozens of objects.
Shapes: N samples, T tokens of all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.pack import ColumnName, PerToken
from megarl.batch.packed_trajectories import PackedGroup, PackedTrajectories
from megarl.batch.sample_table import SampleKey, SampleTable
from megarl.batch.trajectory import Trajectory
from megarl.cluster.workers.payload import LocalPayload, Payload, fetch_all
from megarl.megatron.requests import ForwardRequest, TokenColumn, TrainRequest, Trajectories
from megarl.megatron.training.samples import merge_column, payloads_by_index


@dataclass(frozen=True, eq=False)
class PackedPayloads(Mapping[int, Payload[Trajectories]]):
    """Trajectories of several payloads by payload and index, packed together."""

    keys_N2: NDArray[np.int64]
    """[N, 2]: payload and index of each trajectory; those of a payload are adjacent, by ascending index."""
    packed: PackedTrajectories
    """The N trajectories."""

    @cached_property
    def _places(self) -> dict[int, range]:
        """By payload, the places of its trajectories among the N."""
        numbers_N = self.keys_N2[:, 0]
        starts_P = np.flatnonzero(np.diff(numbers_N, prepend=-1))
        bounds = [*starts_P.tolist(), len(numbers_N)]
        numbers = numbers_N[starts_P].tolist()
        return {number: range(*own) for number, own in zip(numbers, pairwise(bounds), strict=True)}

    def __getitem__(self, number: int) -> LocalPayload[Trajectories]:
        return LocalPayload(_Members(self, self._places[number]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, eq=False)
class _Members(Mapping[int, Trajectory]):
    """The trajectories of one payload by their index."""

    payloads: PackedPayloads
    places: range

    @cached_property
    def _indices(self) -> list[int]:
        indices: list[int] = self.payloads.keys_N2[self.places.start : self.places.stop, 1].tolist()
        return indices

    def __getitem__(self, index: int) -> Trajectory:
        place = bisect_left(self._indices, index)
        if place == len(self._indices) or self._indices[place] != index:
            raise KeyError(index)
        return self.payloads.packed[self.places[place]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, eq=False)
class PackedColumn(Mapping[SampleKey, PerToken]):
    """Values per token of N samples in one array, by sample key."""

    keys_N2: NDArray[np.int64]
    """[N, 2]: key of each sample."""
    offsets: NDArray[np.int64]
    """[N + 1]: offsets of the samples in the array."""
    tokens: PerToken
    """float32 [T], or routes [T, L, k]"""

    @classmethod
    def of(cls, column: TokenColumn, keys_N2: NDArray[np.int64]) -> PackedColumn:
        """Return a copy of the values of these samples."""
        merged = merge_column(column)
        parts = [merged[key] for key in map(tuple, keys_N2.tolist())]
        return cls(keys_N2, np.cumsum([0, *map(len, parts)]), np.concatenate(parts))

    @cached_property
    def _positions(self) -> dict[SampleKey, int]:
        return {key: position for position, key in enumerate(map(tuple, self.keys_N2.tolist()))}

    def __getitem__(self, key: SampleKey) -> PerToken:
        position = self._positions[key]
        values: PerToken = self.tokens[self.offsets[position] : self.offsets[position + 1]]
        return values

    def __iter__(self) -> Iterator[SampleKey]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self.keys_N2)


def pack_samples[R: (TrainRequest, ForwardRequest)](request: R) -> R:
    """Fetch the samples and columns of a replica's request; return the request with their copies in large arrays."""
    tables = request.mini_batches if isinstance(request, TrainRequest) else (request,)
    keys_N2 = _distinct([SampleTable.of(each.samples).keys_N2 for each in tables])
    if not len(keys_N2):
        return request
    by_index: dict[int, Payload[Trajectories]] = payloads_by_index(request)
    columns: Mapping[ColumnName, Payload[TokenColumn]] = request.columns if isinstance(request, TrainRequest) else {}
    wanted: list[Payload[Any]] = [*by_index.values(), *columns.values()]
    fetched = fetch_all(wanted)  # all in one call
    groups: dict[int, Trajectories] = dict(zip(by_index, fetched, strict=False))
    numbers_P, starts_P = np.unique(keys_N2[:, 0], return_index=True)
    members = dict(zip(numbers_P.tolist(), np.split(keys_N2, starts_P[1:]), strict=True))
    ordered = sorted(members, key=_storage_order(groups))
    keys_N2 = np.concatenate([members[number] for number in ordered])
    parts = [_select(groups[number], members[number][:, 1].tolist()) for number in ordered]
    packed = PackedPayloads(keys_N2, PackedTrajectories.join(parts))
    if not isinstance(request, TrainRequest):
        return replace(request, payloads=packed)
    by_name = zip(columns, fetched[len(by_index) :], strict=True)
    own_columns = {name: LocalPayload([PackedColumn.of(column, keys_N2)]) for name, column in by_name}
    return replace(request, payloads=packed, columns=own_columns)


def _storage_order(groups: Mapping[int, Trajectories]) -> Callable[[int], tuple[int, int]]:
    """Return the order of payloads in which groups that are stored together are adjacent, as they are stored."""
    objects: dict[int, int] = {}

    def order(number: int) -> tuple[int, int]:
        group = groups[number]
        if not isinstance(group, PackedGroup):
            return objects.setdefault(id(group), len(objects)), 0
        return objects.setdefault(id(group.packed), len(objects)), group.places.start

    return order


def _select(group: Trajectories, indices: list[int]) -> tuple[Sequence[Trajectory], Sequence[int]]:
    """Return a sequence of trajectories, and the positions there of those with these indices."""
    if isinstance(group, Mapping):
        return [group[index] for index in indices], range(len(indices))
    return group, indices


def _distinct(keys: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the distinct keys, ascending, [N, 2]; a step may train on a sample several times."""
    all_N2 = np.concatenate(keys) if keys else np.zeros((0, 2), np.int64)
    ordered_N2 = all_N2[np.lexsort((all_N2[:, 1], all_N2[:, 0]))]
    is_first_N = np.ones(len(ordered_N2), np.bool_)
    is_first_N[1:] = (ordered_N2[1:] != ordered_N2[:-1]).any(axis=1)
    return ordered_N2[is_first_N]
