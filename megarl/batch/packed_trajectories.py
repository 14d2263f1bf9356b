"""Trajectories in one block of bytes, which processes exchange through shared memory without a copy.

A group of 8 trajectories is 32 arrays and as many Python objects, which take longer to rebuild than their bytes to
copy. Packed, it is one array:

    section      type     items   content
    num_tokens   int32    N       tokens of each trajectory
    num_runs     int32    N       runs of each trajectory
    batch        int32    N       entry of `details` that describes it ...
    row          int32    N       ... and its row there
    run_tokens   int32    R       tokens of each run
    run_version  int32    R       policy version of its tokens
    route_bytes  int32    N       bytes of the routes of each trajectory
    token_ids    int32    T
    logprobs     float32  T
    run_sampled  bool     R       whether the policy sampled its tokens
    routes       uint8    B       routes of each trajectory, as they are in memory

A run is a longest stretch of tokens with the same policy version that were all sampled, or all not.
Shapes: N trajectories, R runs, T tokens, B bytes of routes of all trajectories.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, overload, override

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Trajectory


class ObjectColumns[T](Sequence[T]):
    """Objects of one dataclass, which are made when they are first asked for one by one."""

    __slots__ = ("_cls", "_columns", "_objects")

    def __init__(self, cls: type[T], columns: tuple[tuple[Any, ...], ...]) -> None:
        """`columns`: the values of each field of the dataclass, one for each object."""
        self._cls: Any = cls
        self._columns: tuple[tuple[Any, ...], ...] | None = columns
        self._objects: tuple[T, ...] | None = None

    @classmethod
    def of(cls, kind: type[T], objects: Sequence[T]) -> ObjectColumns[T]:
        """Return the columns of objects of `kind`; those that are columns already stay as they are."""
        if isinstance(objects, ObjectColumns):
            return objects
        found = cls(kind, ())
        found._columns, found._objects = None, tuple(objects)
        return found

    def column(self, name: str) -> tuple[Any, ...]:
        """Return the field of each object."""
        return self.columns()[field_positions(self._cls)[name]]

    def replace(self, **columns: Sequence[Any]) -> ObjectColumns[T]:
        """Return the objects with other values of these fields, one for each object."""
        positions, found = field_positions(self._cls), list(self.columns())
        for name, values in columns.items():
            assert len(values) == len(self), f"{name}: {len(values)} values for {len(self)} objects"
            found[positions[name]] = tuple(values)
        return ObjectColumns(self._cls, tuple(found))

    def columns(self) -> tuple[tuple[Any, ...], ...]:
        """Return the columns of all fields, in the order of the dataclass."""
        if self._columns is None:
            names, objects = _field_names(self._cls), self._all_objects()
            rows = map(attrgetter(*names), objects)
            self._columns = tuple(zip(*rows, strict=True)) if objects else ((),) * len(names)
        return self._columns

    def _all_objects(self) -> tuple[T, ...]:
        if self._objects is None:
            names, rows = _field_names(self._cls), zip(*self.columns(), strict=True)
            self._objects = tuple([self._cls(**dict(zip(names, row, strict=True))) for row in rows])
        return self._objects

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    @override
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._all_objects()[index]

    @override
    def __iter__(self) -> Iterator[T]:
        return iter(self._all_objects())

    @override
    def __len__(self) -> int:
        return len(self._objects if self._columns is None else self._columns[0])  # type: ignore[arg-type]

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, ObjectColumns):
            return self._cls is other._cls and self.columns() == other.columns()
        return self._all_objects() == other if isinstance(other, tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        return repr(self._all_objects())

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # objects with equal values share one of them where they are unpickled
        columns = [(column[0],) * len(column) if _is_constant(column) else column for column in self.columns()]
        return ObjectColumns, (self._cls, tuple(columns))


def _is_constant(column: tuple[Any, ...]) -> bool:
    if len(column) < 2:
        return False
    first, kind = column[0], type(column[0])
    return all(value is first or (type(value) is kind and value == first) for value in column)


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple([each.name for each in fields(cls)])


@cache
def field_positions(cls: Any) -> dict[str, int]:
    """Return the index of each field of a dataclass by its name."""
    return {name: i for i, name in enumerate(_field_names(cls))}


def with_values[T](instance: T, **values: object) -> T:
    """Return a copy of an object of a dataclass without slots, with other values of some fields.

    `dataclasses.replace` looks at each field and takes several times as long. `__post_init__` is not called.
    """
    changed = object.__new__(type(instance))
    changed.__dict__.update(instance.__dict__, **values)
    return changed


SECTIONS: Mapping[str, type[np.generic]] = {
    "num_tokens": np.int32,
    "num_runs": np.int32,
    "batch": np.int32,
    "row": np.int32,
    "run_tokens": np.int32,
    "run_version": np.int32,
    "route_bytes": np.int32,
    "token_ids": np.int32,
    "logprobs": np.float32,
    "run_sampled": np.bool_,
    "routes": np.uint8,
}
"""Type of each section, in their order; those of one byte come last, so that the others are aligned."""

UNITS: Mapping[str, str] = {
    "run_tokens": "run",
    "run_version": "run",
    "token_ids": "token",
    "logprobs": "token",
    "run_sampled": "run",
    "routes": "byte",
}
"""Unit of the sections that do not have one item per trajectory."""

DETAILS = ("prompt_id", "group_id", "rewards", "reward", "reward_errors", "finish_reason", "segment", "turn_rewards")
"""Fields of a trajectory that have no value per token."""

_NO_ROUTES: NDArray[np.uint8] = np.zeros(0, np.uint8)


@dataclass(frozen=True, eq=False)
class PackedTrajectories(Sequence[Trajectory]):
    """A sequence of trajectories in one array; each is made at its access, and its tokens are slices of the array."""

    data: NDArray[np.uint8]
    """The sections, one after another."""
    sizes: tuple[int, ...]
    """Number of items of each section."""
    details: tuple[bytes, ...]
    """Pickled lists with the values of `DETAILS`, and type and shape of the routes, of trajectories that were packed
    together; unpickled at first use."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> PackedTrajectories:
        """Return a copy of the trajectories; themselves if they are packed."""
        if isinstance(trajectories, PackedTrajectories):
            return trajectories
        num_tokens_N = np.array([trajectory.num_tokens for trajectory in trajectories], np.int32)
        version_T = _concatenate([trajectory.policy_versions for trajectory in trajectories], np.int32)
        sampled_T = _concatenate([trajectory.loss_mask for trajectory in trajectories], np.bool_)
        ends_N = np.cumsum(num_tokens_N)
        starts_run_T = np.ones(len(version_T), np.bool_)
        starts_run_T[1:] = (version_T[1:] != version_T[:-1]) | (sampled_T[1:] != sampled_T[:-1])
        starts_run_T[(ends_N - num_tokens_N)[num_tokens_N > 0]] = True
        starts_R = np.flatnonzero(starts_run_T)
        runs_before_N = np.searchsorted(starts_R, np.append(ends_N - num_tokens_N, len(version_T)))
        sections = {
            "num_tokens": num_tokens_N,
            "num_runs": np.diff(runs_before_N),
            "batch": np.zeros(len(trajectories), np.int32),
            "row": np.arange(len(trajectories), dtype=np.int32),
            "run_tokens": np.diff(starts_R, append=len(version_T)),
            "run_version": version_T[starts_R],
            "token_ids": _concatenate([trajectory.token_ids for trajectory in trajectories], np.int32),
            "logprobs": _concatenate([trajectory.logprobs for trajectory in trajectories], np.float32),
            "run_sampled": sampled_T[starts_R],
        }
        routes = [_NO_ROUTES if each.routes is None else _as_bytes(each.routes) for each in trajectories]
        sections |= {
            "route_bytes": np.array([len(of_one) for of_one in routes], np.int32),
            "routes": _concatenate(routes, np.uint8),
        }
        forms = [None if each.routes is None else (each.routes.dtype.str, each.routes.shape) for each in trajectories]
        values = [
            (*(getattr(trajectory, name) for name in DETAILS), form)
            for trajectory, form in zip(trajectories, forms, strict=True)
        ]
        return _assemble(lambda name: [sections[name]], (pickle.dumps(values, protocol=5),))

    @classmethod
    def join(cls, parts: Sequence[tuple[Sequence[Trajectory], Sequence[int]]]) -> PackedTrajectories:
        """Return a copy of some trajectories of several sequences.

        Args:
            parts: sequences, each with the ascending indices of its trajectories. Adjacent groups of an object are
                copied together.
        """
        sources: list[PackedTrajectories] = []
        bounds: list[dict[str, slice]] = []
        """For each of them, the slices of its sections by unit."""
        details: list[bytes] = []
        batches: list[NDArray[np.int32]] = []
        first_details: dict[int, int] = {}
        """By sequence that is packed together, where its details begin."""
        for packed, places in _merge_groups(parts):
            if not places:
                continue  # it is not kept in `sources`, and its id may be given again
            if id(packed) not in first_details:
                first_details[id(packed)] = len(details)
                details += packed.details
            for first, stop in _ranges(places):
                sources.append(packed)
                bounds.append(packed._bounds(first, stop))
                batches.append(packed._section("batch")[first:stop] + first_details[id(packed)])

        def find(name: str) -> list[NDArray[Any]]:
            if name == "batch":
                return batches
            unit = UNITS.get(name, "trajectory")
            return [packed._section(name)[of[unit]] for packed, of in zip(sources, bounds, strict=True)]

        return _assemble(find, tuple(details))

    def __len__(self) -> int:
        return self.sizes[0]

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        """Return one trajectory, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        n = range(len(self))[index]
        bounds = self._bounds(n, n + 1)
        tokens, runs = bounds["token"], bounds["run"]
        run_tokens_r = self._section("run_tokens")[runs]
        *values, form = self._details[self._section("batch")[n]][self._section("row")[n]]
        route_bytes = self._section("routes")[bounds["byte"]]
        return Trajectory(
            token_ids=self._section("token_ids")[tokens],
            logprobs=self._section("logprobs")[tokens],
            loss_mask=np.repeat(self._section("run_sampled")[runs], run_tokens_r),
            policy_versions=np.repeat(self._section("run_version")[runs], run_tokens_r),
            routes=None if form is None else route_bytes.view(form[0]).reshape(form[1]),
            **dict(zip(DETAILS, values, strict=True)),
        )

    def __iter__(self) -> Iterator[Trajectory]:
        return (self[n] for n in range(len(self)))

    def __eq__(self, other: object) -> bool:
        raise TypeError("packed trajectories are compared one by one")

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedTrajectories, (self.data, self.sizes, self.details)  # without what was computed from them

    def _bounds(self, first: int, stop: int) -> dict[str, slice]:
        """Return the part of the sections that belongs to trajectories `first` to `stop - 1`, by unit."""
        tokens, runs = self._offsets[[first, stop]].tolist(), self._run_offsets[[first, stop]].tolist()
        route_bytes = self._route_offsets[[first, stop]].tolist()
        return {
            "trajectory": slice(first, stop),
            "run": slice(*runs),
            "token": slice(*tokens),
            "byte": slice(*route_bytes),
        }

    def _section(self, name: str) -> NDArray[Any]:
        return self._sections[name]

    @cached_property
    def _sections(self) -> dict[str, NDArray[Any]]:
        found, start = {}, 0
        for (name, dtype), size in zip(SECTIONS.items(), self.sizes, strict=True):
            stop = start + size * np.dtype(dtype).itemsize
            found[name] = self.data[start:stop].view(dtype)
            start = stop
        return found

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        """Offsets of the trajectories in the tokens, [N + 1]."""
        return _offsets(self._section("num_tokens"))

    @cached_property
    def _run_offsets(self) -> NDArray[np.int64]:
        """Offsets of the trajectories in the runs, [N + 1]."""
        return _offsets(self._section("num_runs"))

    @cached_property
    def _route_offsets(self) -> NDArray[np.int64]:
        """Offsets of the trajectories in the bytes of the routes, [N + 1]."""
        return _offsets(self._section("route_bytes"))

    @cached_property
    def _details(self) -> list[list[tuple[Any, ...]]]:
        return list(map(pickle.loads, self.details))


@dataclass(frozen=True, eq=False)
class PackedGroup(Sequence[Trajectory]):
    """The trajectories of a group, consecutive ones of those that are packed together."""

    packed: PackedTrajectories
    places: range
    """Places of the group's trajectories in `packed`."""

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        """Return one trajectory, or a list of them."""
        if isinstance(index, slice):
            return [self.packed[n] for n in self.places[index]]
        return self.packed[self.places[index]]

    def __iter__(self) -> Iterator[Trajectory]:
        return (self.packed[n] for n in self.places)


@dataclass(frozen=True, eq=False)
class PackedGroups(Sequence[PackedGroup]):
    """Groups of trajectories in one array; their number hardly matters to the time of a transfer."""

    packed: PackedTrajectories
    sizes: tuple[int, ...]
    """Number of trajectories of each group."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[Trajectory]]) -> PackedGroups:
        """Return a copy of the groups."""
        packed = PackedTrajectories.join([(group, range(len(group))) for group in groups])
        return cls(packed, tuple(map(len, groups)))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> PackedGroup: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedGroup]: ...

    def __getitem__(self, index: int | slice) -> PackedGroup | list[PackedGroup]:
        """Return one group, or a list of them."""
        if isinstance(index, slice):
            return [self[g] for g in range(len(self))[index]]
        first = sum(self.sizes[: range(len(self))[index]])
        return PackedGroup(self.packed, range(first, first + self.sizes[index]))


def _merge_groups(
    parts: Iterable[tuple[Sequence[Trajectory], Sequence[int]]],
) -> Iterator[tuple[PackedTrajectories, list[int]]]:
    """Yield packed trajectories and the places of those to take; adjacent groups that are packed together are one."""
    current: PackedTrajectories | None = None
    places: list[int] = []
    for trajectories, indices in parts:
        if isinstance(trajectories, PackedGroup):
            packed, own = trajectories.packed, [trajectories.places[i] for i in indices]
        else:
            packed, own = PackedTrajectories.of(trajectories), list(indices)
        if packed is current:
            places += own
            continue
        if current is not None:
            yield current, places
        current, places = packed, own
    if current is not None:
        yield current, places


def _assemble(find: Callable[[str], Sequence[NDArray[Any]]], details: tuple[bytes, ...]) -> PackedTrajectories:
    """Return the trajectories whose section `name` is the concatenation of `find(name)`."""
    found = {name: find(name) for name in SECTIONS}
    sizes = {name: sum(map(len, parts)) for name, parts in found.items()}
    data = np.empty(sum(sizes[name] * np.dtype(dtype).itemsize for name, dtype in SECTIONS.items()), np.uint8)
    packed = PackedTrajectories(data, tuple(sizes.values()), details)
    for name, parts in found.items():
        if parts:
            np.concatenate(parts, out=packed._section(name), casting="same_kind")
    return packed


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype)


def _as_bytes(routes: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(routes).reshape(-1).view(np.uint8)


def _offsets(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _ranges(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, each as (first, last + 1)."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return found
