"""The samples of requests: split over data-parallel replicas, packed into a few arrays, fetched by the ranks.

A replica is sent its own samples, and references to the payloads and columns that hold them. Its first rank fetches
these for all of its ranks, which are sent the same request.

    controller -- request with references --> first rank of a replica: `pack_samples`
                                                     |
                        ranks of the replica <-- request with arrays (one object, read without a copy)

A rank that fetched each group by itself would handle dozens of objects. It gets its samples as `StepSamples`.

Shapes: N samples, T tokens of all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.balance import QWEN2_5_7B, SequenceCost, plan_micro_batches, plan_whole_groups
from megarl.batch.pack import ColumnName, PerToken, SampleKey, SampleRef, SampleTable, padded_length
from megarl.batch.packed_trajectories import PackedGroup, PackedTrajectories
from megarl.batch.trajectory import ROUTES, Routes, Trajectory, find_mixed_kv
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import Dispatch, LocalPayload, Payload, RemoteResults, fetch_all, from_output_rank
from megarl.megatron.requests import (
    ForwardRequest,
    MiniBatch,
    Payloads,
    RequestTotals,
    TokenColumn,
    TrainRequest,
    TrainStats,
    Trajectories,
    VersionRange,
)


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


MicroBatches = tuple[tuple[int, ...], ...]
"""Micro-batches as indices into the samples of a request."""


def plan_replica_micro_batches(
    lengths: Sequence[int], grid: RankGrid, *, max_tokens: int, cost: SequenceCost
) -> list[MicroBatches]:
    """Plan the micro-batches of each data-parallel replica, as indices into `lengths`, in tokens."""
    padded_N = _padded(np.array(lengths, np.int64), grid.cp)
    return plan_replicas(padded_N.tobytes(), (), grid, max_tokens, cost)


def split_by_dp(request: TrainRequest, grid: RankGrid, *, cost: SequenceCost = QWEN2_5_7B) -> list[TrainRequest]:
    """Return one request per rank, with its replica's micro-batches: balanced by cost, equally many on every rank.

    Ranks of one replica get the same object.
    """
    per_replica: list[list[MiniBatch]] = [[] for _ in range(grid.dp)]
    tables = [SampleTable.of(batch.samples) for batch in request.mini_batches]
    for batch, samples in zip(request.mini_batches, tables, strict=True):
        plan = _plan_samples(
            samples, request.payload_blocks, grid, request.max_tokens_per_micro_batch, cost, request.sequences_per_unit
        )
        for batches, (own, micro_batches) in zip(per_replica, plan, strict=True):
            batches.append(replace(batch, samples=own, micro_batches=micro_batches))
    totals = RequestTotals(
        num_tokens=sum(samples.num_tokens for samples in tables),
        forward_flops=sum(cost.total_flops(samples.num_tokens_N) for samples in tables),
    )
    requests = []
    for batches in per_replica:
        keys_N2 = np.concatenate(
            [SampleTable.of(batch.samples).keys_N2 for batch in batches] or [np.zeros((0, 2), int)]
        )
        columns = {name: select_values(column, keys_N2) for name, column in request.columns.items()}
        payloads = _select_payloads(request.payloads, keys_N2)
        requests.append(
            replace(
                request,
                mini_batches=tuple(batches),
                payloads=payloads,
                payload_blocks=(),
                columns=columns,
                totals=totals,
            )
        )
    return _by_rank(requests, grid)


def split_forward_by_dp(
    request: ForwardRequest, grid: RankGrid, *, cost: SequenceCost = QWEN2_5_7B
) -> list[ForwardRequest]:
    """Return one request per rank, with its replica's micro-batches; ranks of one replica get the same object."""
    plan = _plan_forward(request, grid, cost)
    requests = [
        replace(
            request,
            samples=own,
            micro_batches=micro_batches,
            payloads=_select_payloads(request.payloads, own.keys_N2),
            payload_blocks=(),
        )
        for own, micro_batches in plan
    ]
    return _by_rank(requests, grid)


def train_dispatch(cost: SequenceCost) -> Dispatch[TrainRequest, TrainStats]:
    """Split samples over data-parallel replicas and return one rank's result, since the workers reduce the metrics."""
    split = partial(split_by_dp, cost=cost)
    return Dispatch(split, from_output_rank, equal_work=True, by_reference=True, prepare=pack_samples)


def forward_dispatch(cost: SequenceCost) -> Dispatch[ForwardRequest, Mapping[SampleKey, Any]]:
    """Split samples over data-parallel replicas and merge the results of all replicas."""
    split = partial(split_forward_by_dp, cost=cost)
    return Dispatch(split, _merge, equal_work=True, by_reference=True, prepare=pack_samples)


def _merge(results: Sequence[Mapping[SampleKey, Any]], _: RankGrid) -> Mapping[SampleKey, Any]:
    merged: dict[SampleKey, Any] = {}
    for result in results:
        merged.update(result)
    return merged


def computed_column(
    request: ForwardRequest, results: Payload[TokenColumn], grid: RankGrid, *, cost: SequenceCost
) -> Payload[TokenColumn]:
    """Return the column that the replicas have computed for a forward request, each for its own samples.

    Args:
        results: of each replica; those in other processes can be fetched one by one.
    """
    if not isinstance(results, RemoteResults):
        return results
    return ComputedColumn.of(results.refs, [own.keys_N2 for own, _ in _plan_forward(request, grid, cost)])


def _plan_forward(
    request: ForwardRequest, grid: RankGrid, cost: SequenceCost
) -> list[tuple[SampleTable, MicroBatches]]:
    samples = SampleTable.of(request.samples)
    return _plan_samples(samples, request.payload_blocks, grid, request.max_tokens_per_micro_batch, cost)


def _plan_samples(
    samples: SampleTable,
    blocks: Sequence[int],
    grid: RankGrid,
    max_tokens: int,
    cost: SequenceCost,
    sequences_per_unit: int = 1,
) -> list[tuple[SampleTable, MicroBatches]]:
    """Return the samples of each replica in their order, and its micro-batches as indices into them.

    Units of consecutive samples share a micro-batch.

    Args:
        blocks: of the payloads, as `ForwardRequest.payload_blocks`.
    """
    assert len(samples) % sequences_per_unit == 0, f"{len(samples)} % {sequences_per_unit} != 0"
    padded_N = _padded(samples.num_tokens_N, grid.cp)
    lengths_U = padded_N.reshape(-1, sequences_per_unit).sum(axis=1)
    payloads_U = np.ascontiguousarray(samples.keys_N2[::sequences_per_unit, 0])
    blocks_U = np.array(blocks, np.int64)[payloads_U] if blocks else payloads_U
    holders = tuple(dict.fromkeys((blocks_U.tobytes(), payloads_U.tobytes())))
    return [
        _take_micro_batches(samples, units, sequences_per_unit)
        for units in plan_replicas(lengths_U.tobytes(), holders, grid, max_tokens, cost)
    ]


def _take_micro_batches(samples: SampleTable, units: MicroBatches, per_unit: int) -> tuple[SampleTable, MicroBatches]:
    """Return the samples of these micro-batches of units, and the micro-batches as indices into them."""
    sizes = np.array([len(of) for of in units], np.int64)
    units_U = np.array([unit for of in units for unit in of], np.int64)
    indices_N = (per_unit * units_U[:, None] + np.arange(per_unit)).reshape(-1)
    own_N = np.sort(indices_N)
    local_N = np.searchsorted(own_N, indices_N)
    local, bounds = local_N.tolist(), [0, *(per_unit * np.cumsum(sizes)).tolist()]
    return samples.take(own_N), tuple(tuple(local[a:b]) for a, b in pairwise(bounds))


def _padded(lengths_N: NDArray[np.int64], cp: int) -> NDArray[np.int64]:
    return lengths_N if cp == 1 else np.array([padded_length(n, cp) for n in lengths_N.tolist()], np.int64)


@lru_cache(maxsize=16)
def plan_replicas(
    lengths: bytes, holders: tuple[bytes, ...], grid: RankGrid, max_tokens: int, cost: SequenceCost
) -> list[MicroBatches]:
    """Plan micro-batches of int64 `lengths`; kept, because critics, references and the policy get the same samples.

    Args:
        holders: what a replica should need few of: for each length its block, int64, and its payload. They are tried
            in this order; the plan splits both if replicas would not be balanced otherwise.
    """
    lengths_N, plan = np.frombuffer(lengths, np.int64), None
    for numbers in holders:
        groups_N, exchanges = np.frombuffer(numbers, np.int64), grid.ep > 1
        plan = plan or plan_whole_groups(
            lengths_N, groups_N, dp=grid.dp, max_tokens=max_tokens, exchanges=exchanges, cost=cost
        )
    plan = plan or plan_micro_batches(lengths_N, dp=grid.dp, max_tokens=max_tokens, cost=cost)
    return [tuple(map(tuple, micro_batches)) for micro_batches in plan]


def _select_payloads(payloads: Payloads, keys_N2: NDArray[np.int64]) -> Payloads:
    """Return by index the payloads that hold a sample of these keys."""
    numbers = np.unique(keys_N2[:, 0]).tolist()
    if not any(isinstance(payloads[number], LocalPayload) for number in numbers):
        return {number: payloads[number] for number in numbers}
    order_N = np.lexsort((keys_N2[:, 1], keys_N2[:, 0]))
    sorted_N2 = keys_N2[order_N]
    numbers_P, starts_P = np.unique(sorted_N2[:, 0], return_index=True)
    members = np.split(sorted_N2[:, 1], starts_P[1:]) if len(numbers_P) else []
    return {
        number: select_samples(payloads[number], indices)
        for number, indices in zip(numbers_P.tolist(), members, strict=True)
    }


def _by_rank[R](requests: Sequence[R], grid: RankGrid) -> list[R]:
    return [requests[grid.coordinates(rank).dp] for rank in range(grid.size)]
