"""Index tables of one sync: what the ranks of both sides hold and need.

    held      every distinct box of every tensor, and the ranks that hold it
    classes   the boxes of each distinct needed layout; large boxes are split into parts that fit a round
    rounds    the tensors in transfer order, cut so that no rank receives more than a bucket per round

The tables are a pure function of the layouts: every rank builds the same ones without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.model_files.header import itemsize
from megarl.reshard.layout.layout import PieceTable, TensorSpec, WeightLayout, widen
from megarl.reshard.layout.topology import SourceSelector, Topology

Ints = NDArray[Any]
Ranks = tuple[int, ...]

RECEIVER_HASH_BITS = 22
"""Leading hash bits compared first: enough that few of a million boxes collide by chance."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """N boxes of many tensors, sorted by tensor: arrays [N], or [N, D] with D the largest number of dimensions."""

    tensor: Ints
    """Index of the tensor in `SyncIndex.names`."""
    start: Ints
    stop: Ints
    shift: Ints
    """Offset from the box's coordinates to its coordinates in the local tensor."""
    local: Ints
    """Index of the local tensor's name."""
    part: Ints
    """Index of the part: a large box is split into parts that are sent in separate rounds."""

    def take(self, rows: Ints) -> Boxes:
        """Return the boxes of the given rows."""
        return Boxes(*(getattr(self, name)[rows] for name in Boxes.__slots__))


@dataclass(frozen=True, slots=True)
class NeedClass:
    """Ranks that need the same boxes."""

    ranks: Ranks
    boxes: Boxes
    locals: tuple[str, ...]
    receivers: Ints
    """By box, all ranks of all classes that need exactly this box: an index into `SyncIndex.receiver_sets`."""


class SyncIndex:
    """Index tables of one sync, identical on every rank."""

    def __init__(
        self,
        sources: Sequence[WeightLayout],
        needs: Mapping[int, WeightLayout],
        topology: Topology,
        *,
        groups: Sequence[Sequence[int]] = (),
        relay: bool = True,
        bucket_bytes: int,
    ) -> None:
        """Build the tables from the layouts of both sides.

        Args:
            sources: by rank, the layout it holds.
            needs: by rank, the layout it has to receive.
            groups: ranks that prefer to receive from each other, such as micro-DP groups.
            relay: a box that no rank of a node holds enters the node once, and is relayed within it.
            bucket_bytes: the most that a rank receives in one round; a single row of a box is never split.
        """
        self.topology, self.groups, self.relay = topology, tuple(map(tuple, groups)), relay
        self.group_of = {rank: index for index, group in enumerate(self.groups) for rank in group}
        self._source_selectors: dict[tuple[int, int], SourceSelector] = {}
        self.sources = sources
        layouts = _distinct([needs[rank] for rank in sorted(needs)], sorted(needs))
        specs: dict[str, TensorSpec] = {}
        for layout, _ in layouts:
            specs.update(layout.tensors)
        self.names, self.specs = tuple(specs), tuple(specs.values())
        self._number = {name: i for i, name in enumerate(self.names)}
        self._last_numbers: tuple[tuple[str, ...], Ints] | None = None
        self.itemsize = np.array([itemsize(spec.dtype) for spec in self.specs], np.int64)
        self.width = max((len(spec.shape) for spec in self.specs), default=1) or 1
        self._index_sources(sources)
        self.order = self._interleave()
        self._index_needs(layouts, bucket_bytes)
        self.class_of = {rank: number for number, each in enumerate(self.classes) for rank in each.ranks}

    # -- sources

    def _index_sources(self, sources: Sequence[WeightLayout]) -> None:
        layouts = _distinct(sources, range(len(sources)))
        tables = [self._boxes(layout.table) for layout, _ in layouts]
        of_layout = np.repeat(np.arange(len(tables)), [len(t.tensor) for t in tables])
        every = _concatenate(tables, self.width)
        keys = [*(column for dim in range(self.width)[::-1] for column in (every.stop[:, dim], every.start[:, dim]))]
        order = np.lexsort((of_layout, *keys, every.tensor))
        every, of_layout = every.take(order), of_layout[order]
        rows = np.column_stack([every.tensor, every.start, every.stop])
        first = np.ones(len(rows), bool)
        first[1:] = (rows[1:] != rows[:-1]).any(axis=1)
        starts = np.flatnonzero(first)
        self.held = every.take(starts)
        """Every distinct held box once, sorted by tensor."""
        self.held_by, self.holders = _rank_sets(of_layout, starts, [ranks for _, ranks in layouts])
        self.held_start, self.held_count = extents(self.held.tensor, len(self.names))

    def _boxes(self, table: PieceTable, order: Ints | None = None) -> Boxes:
        """Return the table's boxes of needed tensors, sorted by tensor, or by `order` of the tensor."""
        tensor = self._numbers(table.tensors)[table.tensor]
        rows = np.argsort(tensor if order is None else order[tensor], kind="stable")
        rows = rows[tensor[rows] >= 0]
        box = widen(table.boxes[rows, : self.width], self.width).astype(np.int64)
        local = widen(table.local_boxes[rows, : self.width], self.width)
        return Boxes(
            tensor[rows],
            box[..., 0],
            box[..., 1],
            local[..., 0] - box[..., 0],
            table.local[rows].astype(np.int64),
            np.zeros(len(rows), np.int64),
        )

    def _numbers(self, names: tuple[str, ...]) -> Ints:
        if self._last_numbers is None or self._last_numbers[0] != names:  # tables of one side mostly share their names
            self._last_numbers = names, np.array([self._number.get(name, -1) for name in names], np.int64)
        return self._last_numbers[1]

    def held_by_rank(self, rank: int) -> tuple[Boxes, Ints]:
        """Return the boxes that `rank` holds, and the row of each in `held`."""
        mine = self._boxes(self.sources[rank].table)
        at, of = _join(mine, self.held_start, self.held_count)
        same = (mine.start[at] == self.held.start[of]).all(axis=1) & (mine.stop[at] == self.held.stop[of]).all(axis=1)
        at, of = at[same], of[same]
        _, once = np.unique(of, return_index=True)  # the same box may be held under two names
        return mine.take(at[once]), of[once]

    def _interleave(self) -> Ints:
        """Return the transfer order [num tensors], with tensors of different holders interleaved.

        Otherwise pipeline stages and expert-parallel ranks would send one after another instead of all at once.
        """
        count = len(self.names)
        size = np.bincount(self.held.tensor, _volumes(self.held) * self.itemsize[self.held.tensor], count)
        first = np.minimum(self.held_start, max(len(self.held_by) - 1, 0))
        stage = np.where(self.held_count > 0, self.held_by[first] if len(self.held_by) else 0, -1)
        progress = np.zeros(count)
        for number in np.unique(stage):
            members = np.flatnonzero(stage == number)
            total = np.cumsum(size[members])
            progress[members] = (total - size[members] / 2) / max(total[-1], 1)
        order = np.empty(count, np.int64)
        order[np.argsort(progress, kind="stable")] = np.arange(count)
        return order

    # -- needs

    def _index_needs(self, layouts: Sequence[tuple[WeightLayout, Ranks]], bucket_bytes: int) -> None:
        tables = [self._boxes(layout.table, self.order) for layout, _ in layouts]
        parts = self._count_parts(tables, bucket_bytes)
        tables = [_split(table, parts) for table in tables]
        self._cut(tables, parts, bucket_bytes)
        receiver_sets, self.receiver_sets = self._find_receiver_sets(tables, [ranks for _, ranks in layouts])
        self.classes = tuple(
            NeedClass(ranks, table, layout.table.locals, receivers)
            for (layout, ranks), table, receivers in zip(layouts, tables, receiver_sets, strict=True)
        )

    def _count_parts(self, tables: Sequence[Boxes], bucket_bytes: int) -> Ints:
        """Return, by tensor, the number of parts its boxes are split into: at most one per row of the tensor."""
        count = len(self.names)
        parts = np.ones(count, np.int64)
        rows = np.array([spec.shape[0] if spec.shape else 1 for spec in self.specs], np.int64)
        for table in tables:
            size = _volumes(table) * self.itemsize[table.tensor]
            tensor_bytes = np.bincount(table.tensor, weights=size, minlength=count)
            if (tensor_bytes <= bucket_bytes).all():
                continue
            row = np.bincount(table.tensor, size / np.maximum(table.stop[:, 0] - table.start[:, 0], 1), count)
            # rounding may give a part one row more than its share
            num_parts = np.where(
                tensor_bytes > bucket_bytes, np.ceil(tensor_bytes / np.maximum(bucket_bytes - row, 1)), 1
            )
            parts = np.maximum(parts, np.minimum(num_parts.astype(np.int64), rows))
        return parts

    def _cut(self, tables: Sequence[Boxes], parts: Ints, bucket_bytes: int) -> None:
        """Group consecutive tensor parts into rounds of which every class needs at most a bucket."""
        by_transfer_order = np.argsort(self.order)
        self._first_item = np.empty(len(parts), np.int64)
        self._first_item[by_transfer_order] = np.cumsum(parts[by_transfer_order]) - parts[by_transfer_order]
        items = int(parts.sum())
        total = np.zeros((max(len(tables), 1), items + 1))
        for number, table in enumerate(tables):
            size = _volumes(table) * self.itemsize[table.tensor]
            total[number] = np.bincount(1 + self._first_item[table.tensor] + table.part, size, items + 1)
        total = np.cumsum(total, axis=1)
        self._round_of_item, start, number = np.zeros(items, np.int64), 0, 0
        while start < items:
            ends = [np.searchsorted(row, row[start] + bucket_bytes + 0.5) - 1 for row in total]
            stop = max(int(min(ends)), start + 1)
            self._round_of_item[start:stop] = number
            start, number = stop, number + 1
        self.num_rounds = number

    def item_of(self, tensor: Ints, part: Ints) -> Ints:
        """Return the index of each tensor part among all parts, in transfer order."""
        items: Ints = self._first_item[tensor] + part
        return items

    def round_of(self, tensor: Ints, part: Ints) -> Ints:
        """Return the round in which each tensor part is sent."""
        rounds: Ints = self._round_of_item[self.item_of(tensor, part)]
        return rounds

    def _find_receiver_sets(self, tables: Sequence[Boxes], ranks: Sequence[Ranks]) -> tuple[list[Ints], list[Ranks]]:
        """Return, by class and box, the index of the set of ranks that need exactly this box; and the sets."""
        if len(tables) == 1 or not self.relay or len(set(self.topology.nodes)) == 1:
            # without relays it does not matter which other ranks need the box
            return [np.full(len(table.tensor), number) for number, table in enumerate(tables)], list(ranks)
        of_class = np.repeat(np.arange(len(tables)), [len(t.tensor) for t in tables])
        every = _concatenate(tables, self.width)
        keys = hash_rows([every.tensor, every.part, *every.start.T, *every.stop.T])
        receivers, sets = of_class.copy(), list(ranks)
        # most boxes are needed by one class only: sort just those whose short hash is shared
        short = (keys >> np.uint64(64 - RECEIVER_HASH_BITS)).astype(np.int64)
        some = np.flatnonzero((np.bincount(short) > 1)[short])
        order = some[np.argsort(keys[some], kind="stable")]
        if len(order):
            first = np.r_[True, keys[order][1:] != keys[order][:-1]]
            found, more = _rank_sets(of_class[order], np.flatnonzero(first), ranks)
            receivers[order] = len(sets) + found[np.cumsum(first) - 1]
            sets += more
        return np.split(receivers, np.cumsum([len(t.tensor) for t in tables])[:-1]), sets

    # -- source selection

    def source_selector(self, holders: int, receivers: int) -> SourceSelector:
        """Return the selector for the holder set and the receiver set of these indices; built once and cached."""
        key = holders, receivers
        if key not in self._source_selectors:
            self._source_selectors[key] = SourceSelector(
                self.holders[holders], self.receiver_sets[receivers], self.topology, self.group_of, relay=self.relay
            )
        return self._source_selectors[key]


def intersections(need: Boxes, held: Boxes, start: Ints, count: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return all pairs of boxes that share elements: rows of `need`, rows of `held`, start and stop of the overlap.

    Args:
        start: by tensor, its first row in `held`.
        count: by tensor, its number of rows in `held`.
    """
    at, of = _join(need, start, count)
    low = np.maximum(need.start[at], held.start[of])
    high = np.minimum(need.stop[at], held.stop[of])
    some = (low < high).all(axis=1)
    return at[some], of[some], low[some], high[some]


def _join(boxes: Boxes, start: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Pair every row of `boxes` with every row of the other table that belongs to the same tensor."""
    repeats = count[boxes.tensor]
    at = np.repeat(np.arange(len(boxes.tensor)), repeats)
    first = np.cumsum(repeats) - repeats
    of = np.arange(len(at)) - np.repeat(first, repeats) + np.repeat(start[boxes.tensor], repeats)
    return at, of


def extents(tensor: Ints, count: int) -> tuple[Ints, Ints]:
    """Return, by tensor, its first row in the sorted array `tensor` and its number of rows there."""
    starts = np.searchsorted(tensor, np.arange(count + 1))
    return starts[:-1], np.diff(starts)


def _split(table: Boxes, parts: Ints) -> Boxes:
    """Split the boxes of tensors that have several parts along their first dimension."""
    repeats = parts[table.tensor]
    if (repeats == 1).all():
        return table
    at = np.repeat(np.arange(len(repeats)), repeats)
    cut = table.take(at)
    part = np.arange(len(at)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    rows = cut.stop[:, 0] - cut.start[:, 0]
    low = cut.start[:, 0] + rows * part // repeats[at]
    high = cut.start[:, 0] + rows * (part + 1) // repeats[at]
    start, stop = cut.start.copy(), cut.stop.copy()
    start[:, 0], stop[:, 0] = low, high
    split = Boxes(cut.tensor, start, stop, cut.shift, cut.local, part)
    # within a tensor, sort by part: parts are sent in that order
    order = np.arange(len(at))
    order = np.lexsort((order, part, np.cumsum(np.r_[0, np.diff(cut.tensor) != 0])))
    return split.take(order[(low < high)[order]])


def _volumes(boxes: Boxes) -> Ints:
    volumes: Ints = (boxes.stop - boxes.start).prod(axis=1)
    return volumes


def _concatenate(tables: Sequence[Boxes], width: int) -> Boxes:
    if not tables:
        nothing, flat = np.zeros((0, width), np.int64), np.zeros(0, np.int64)
        return Boxes(flat, nothing, nothing, nothing, flat, flat)
    return Boxes(*(np.concatenate([getattr(t, name) for t in tables]) for name in Boxes.__slots__))


def _rank_sets(of_layout: Ints, starts: Ints, ranks: Sequence[Ranks]) -> tuple[Ints, list[Ranks]]:
    """Return, by run of `of_layout`, the index of the set of ranks of its layouts; and the sets."""
    if not len(starts):
        return np.zeros(0, np.int64), []
    mark = hash_rows([np.arange(1, len(ranks) + 1)])
    sums = np.add.reduceat(mark[of_layout], starts)  # the sum, modulo 2**64, is a hash of the set
    _, first, number = np.unique(sums, return_index=True, return_inverse=True)
    stops = np.r_[starts[1:], len(of_layout)]
    sets = []
    for run in first:
        members = set(of_layout[starts[run] : stops[run]].tolist())
        sets.append(tuple(sorted(rank for layout in members for rank in ranks[layout])))
    return number.reshape(-1).astype(np.int64), sets


def hash_rows(columns: Sequence[Ints]) -> Ints:
    """Return a 64-bit hash per row of the columns."""
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        x = out ^ column.astype(np.uint64)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ (x >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        out = x ^ (x >> np.uint64(32))
    return out


def _distinct(layouts: Sequence[WeightLayout], ranks: Sequence[int]) -> list[tuple[WeightLayout, Ranks]]:
    found: dict[WeightLayout, list[int]] = {}
    for layout, rank in zip(layouts, ranks, strict=True):
        found.setdefault(layout, []).append(rank)
    return [(layout, tuple(members)) for layout, members in found.items()]
