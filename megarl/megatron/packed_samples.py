"""The samples of one data-parallel replica in a few large arrays, which its ranks read from shared memory.

    controller -- request with references --> first rank of a replica: `pack_samples`
                                                     |
                        ranks of the replica <-- request with arrays (one object, read without a copy)

A rank that fetched each group by itself would handle dozens of objects.
Shapes: N samples, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.batch.pack import ColumnName, PerToken
from megarl.batch.packed_trajectories import PackedTrajectories
from megarl.batch.sample_table import SampleKey, SampleTable
from megarl.batch.trajectory import Trajectory
from megarl.megatron.requests import ForwardRequest, TokenColumn, TrainRequest, Trajectories
from megarl.megatron.token_column import merge_column
from megarl.megatron.training.samples import payloads_by_index
from megarl.workers.payload import LocalPayload, Payload, fetch_all

R = TypeVar("R", TrainRequest, ForwardRequest)


@dataclass(frozen=True, eq=False)
class PackedPayloads(Mapping[int, Payload[Trajectories]]):
    """Trajectories of several payloads by payload and index, packed together."""

    keys_N2: NDArray[np.int64]
    """[N, 2]: payload and index of each trajectory, ascending."""
    packed: PackedTrajectories
    """The N trajectories."""

    @cached_property
    def _positions(self) -> dict[int, dict[int, int]]:
        """Position among the N trajectories by payload and index."""
        found: dict[int, dict[int, int]] = {}
        for position, (number, index) in enumerate(self.keys_N2.tolist()):
            found.setdefault(number, {})[index] = position
        return found

    def __getitem__(self, number: int) -> LocalPayload[Trajectories]:
        return LocalPayload(_Members(self.packed, self._positions[number]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


@dataclass(frozen=True, eq=False)
class _Members(Mapping[int, Trajectory]):
    """The trajectories of one payload by their index."""

    packed: PackedTrajectories
    positions: Mapping[int, int]

    def __getitem__(self, index: int) -> Trajectory:
        return self.packed[self.positions[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class PackedColumn(Mapping[SampleKey, PerToken]):
    """Values per token of N samples in one array, by sample key."""

    keys_N2: NDArray[np.int64]
    """[N, 2]: as those of `PackedPayloads`."""
    offsets: NDArray[np.int64]
    """[N + 1]: offsets of the samples in the array."""
    tokens: PerToken
    """float32 [T]"""

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


def pack_samples(request: R) -> R:
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
    members = np.split(keys_N2[:, 1], starts_P[1:])
    parts = [_select(groups[number], own.tolist()) for number, own in zip(numbers_P.tolist(), members, strict=True)]
    packed = PackedPayloads(keys_N2, PackedTrajectories.join(parts))
    if not isinstance(request, TrainRequest):
        return replace(request, payloads=packed)
    by_name = zip(columns, fetched[len(by_index) :], strict=True)
    own_columns = {name: LocalPayload([PackedColumn.of(column, keys_N2)]) for name, column in by_name}
    return replace(request, payloads=packed, columns=own_columns)


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
