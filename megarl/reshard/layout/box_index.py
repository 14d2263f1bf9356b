"""Index tables of one sync: what the ranks of both sides hold and need.

    held      every distinct box of every tensor, and the ranks that hold it
    classes   the boxes of each distinct needed layout; large boxes are split into parts that fit a round
    rounds    the tensors in transfer order, cut so that no rank receives, packs or relays more than a bucket per round

The tables are a pure function of the layouts: every rank builds the same ones without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.model_files.header import itemsize
from megarl.reshard.layout.boxes import (
    Boxes,
    Ints,
    check_dtypes,
    concatenate,
    extents,
    hash_rows,
    intersections,
    local_extents,
    pair_by_tensor,
    split_boxes,
    volumes,
)
from megarl.reshard.layout.layout import PieceTable, TensorSpec, WeightLayout, widen
from megarl.reshard.layout.model_tensors import Names
from megarl.reshard.layout.overlap import find_rank_sets, find_receiver_sets, group_ranks
from megarl.reshard.layout.relay_tree import UNLIMITED, Ranks, RemoteSources
from megarl.reshard.layout.remote_traffic import RemoteTraffic
from megarl.reshard.layout.ring_entries import RingEntries
from megarl.reshard.layout.round_limits import FanOut, Loads, are_contiguous, cut_rounds, round_bytes
from megarl.reshard.layout.topology import SourceSelector, Topology


@dataclass(frozen=True, slots=True)
class NeedClass:
    """Ranks that need the same boxes."""

    ranks: Ranks
    boxes: Boxes
    locals: tuple[str, ...]
    receivers: Ints
    """By box, all ranks of all classes that need exactly this box: an index into `SyncIndex.receiver_sets`."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """N parts of needed boxes that ranks hold and would pack to send: arrays [N], or [N, D]."""

    at: Ints
    """Row of the needed box."""
    of: Ints
    """Row of the held box."""
    low: Ints
    high: Ints
    size: Ints
    """Size of each part in bytes."""
    is_small: Ints


@dataclass(frozen=True, slots=True)
class Overlaps:
    """What ranks hold of the needed boxes."""

    receivers: Sequence[Ints]
    """By class and box, index in `receiver_sets`."""
    receiver_sets: Sequence[Ranks]
    packed: Sequence[Overlap]
    """By class, the parts of its boxes that are packed to be sent."""
    traffic: RemoteTraffic | None
    """Which ranks need boxes of which; None if there is a single node, or nothing is relayed."""


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
        large_bytes: int,
    ) -> None:
        """Build the tables from the layouts of both sides.

        Args:
            sources: by rank, the layout it holds.
            needs: by rank, the layout it has to receive.
            groups: ranks that prefer to receive from each other, such as micro-DP groups.
            relay: a box that no rank of a node holds enters the node once, and is relayed.
            bucket_bytes: half of the memory for all buffers of a rank; a single row of a box is never split.
            large_bytes: a box of at least this size is a message of its own.

        Raises:
            WeightSyncError: ranks have the same tensor in different dtypes.
        """
        self.topology, self.groups, self.relay = topology, tuple(map(tuple, groups)), relay
        self.large_bytes = large_bytes
        self.group_of = {rank: index for index, group in enumerate(self.groups) for rank in group}
        self._source_selectors: dict[tuple[int, int], SourceSelector] = {}
        self.sources, self.needs = sources, needs
        ranks = sorted(needs)
        layouts = group_ranks([needs[rank] for rank in ranks], ranks, lambda layout: layout.digest)
        specs: dict[str, TensorSpec] = {}
        for model in {id(layout.tensors): layout.tensors for layout, _ in layouts}.values():
            specs.update(zip(model.names, model.specs, strict=True))
        check_dtypes({"engines": [layout for layout, _ in layouts], "trainer ranks": sources})
        self.names, self.specs = tuple(specs), tuple(specs.values())
        self._number = {name: i for i, name in enumerate(self.names)}
        self._numbers_of: dict[int, tuple[Names, Ints]] = {}
        self.itemsize = np.array([itemsize(spec.dtype) for spec in self.specs], np.int64)
        self.width = max((len(spec.shape) for spec in self.specs), default=1) or 1
        self._index_sources(sources)
        self.order = self._interleave()
        uncut = [self._boxes(layout.pieces, self.order) for layout, _ in layouts]
        self._ranks = [ranks for _, ranks in layouts]
        whole = self._intersect(uncut, large_bytes)
        self.remote: RemoteSources = UNLIMITED
        self._entries: RingEntries | None = None
        self.num_hops = 1
        if whole.traffic is not None:
            self.remote = whole.traffic.limit()
            self.num_hops = whole.traffic.num_hops(self.remote)
        while True:  # once, unless parts of boxes are needed by more ranks than the boxes
            self.round_bytes = round_bytes(bucket_bytes, self.num_hops)
            """The most that a rank receives, and the most that it packs for sending, in one hop of one round."""
            tables, overlaps = self._cut_to_fit(uncut, whole, large_bytes)
            if overlaps.traffic is None or (num_hops := overlaps.traffic.num_hops(self.remote)) <= self.num_hops:
                break
            self.num_hops = num_hops
        if overlaps.traffic is not None and self.remote.single_root:
            self._entries = RingEntries.choose(overlaps.traffic, self.remote)
        self.receiver_sets = overlaps.receiver_sets
        self.classes: tuple[NeedClass, ...] = tuple(
            NeedClass(ranks, table, layout.pieces.locals.strings, receivers)
            for (layout, ranks), table, receivers in zip(layouts, tables, overlaps.receivers, strict=True)
        )
        self.class_of = {rank: number for number, each in enumerate(self.classes) for rank in each.ranks}

    def release_layouts(self) -> None:
        """Drop the decoded pieces of the layouts that the tables were built from."""
        for layout in {id(layout): layout for layout in (*self.sources, *self.needs.values())}.values():
            layout.pieces.release_columns()

    # -- sources

    def _index_sources(self, sources: Sequence[WeightLayout]) -> None:
        # ranks know the names of their own local tensors only: layouts that differ in them are the same here
        layouts = group_ranks(sources, range(len(sources)), lambda layout: layout.box_digest)
        tables = [self._boxes(layout.pieces) for layout, _ in layouts]
        sizes = [local_extents(layout.pieces, self.width) for layout, _ in layouts]
        extent = np.concatenate([size[t.local] for size, t in zip(sizes, tables, strict=True)])
        of_layout = np.repeat(np.arange(len(tables)), [len(t.tensor) for t in tables])
        every = concatenate(tables, self.width)
        keys = [*(column for dim in range(self.width)[::-1] for column in (every.stop[:, dim], every.start[:, dim]))]
        order = np.lexsort((of_layout, *keys, every.tensor))
        every, of_layout = every.take(order), of_layout[order]
        rows = np.column_stack([every.tensor, every.start, every.stop])
        first = np.ones(len(rows), bool)
        first[1:] = (rows[1:] != rows[:-1]).any(axis=1)
        starts = np.flatnonzero(first)
        self.held = every.take(starts)
        """Every distinct held box once, sorted by tensor."""
        self._held_extent = extent[order][starts]
        """By distinct held box, the size of the local tensor that it lies in."""
        self._holding_layouts = of_layout, starts, np.diff(np.r_[starts, len(of_layout)])
        """Indices of the layouts that hold the boxes; by distinct held box, the first and the number of them."""
        self.held_by, self.holders = find_rank_sets(of_layout, starts, [ranks for _, ranks in layouts])
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

    def _numbers(self, names: Names) -> Ints:
        if id(names) not in self._numbers_of:  # with the names, so that their id stays theirs
            self._numbers_of[id(names)] = names, np.array([self._number.get(name, -1) for name in names], np.int64)
        return self._numbers_of[id(names)][1]

    def held_by_rank(self, rank: int) -> tuple[Boxes, Ints]:
        """Return the boxes that `rank` holds, and the row of each in `held`."""
        mine = self._boxes(self.sources[rank].pieces)
        at, of = pair_by_tensor(mine, self.held_start, self.held_count)
        same = (mine.start[at] == self.held.start[of]).all(axis=1) & (mine.stop[at] == self.held.stop[of]).all(axis=1)
        at, of = at[same], of[same]
        _, once = np.unique(of, return_index=True)  # the same box may be held under two names
        return mine.take(at[once]), of[once]

    def _interleave(self) -> Ints:
        """Return the transfer order [num tensors], with tensors of different holders interleaved.

        Otherwise pipeline stages and expert-parallel ranks would send one after another instead of all at once.
        """
        count = len(self.names)
        size = np.bincount(self.held.tensor, volumes(self.held) * self.itemsize[self.held.tensor], count)
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

    def _cut_to_fit(
        self, uncut: Sequence[Boxes], whole: Overlaps, large_bytes: int
    ) -> tuple[Sequence[Boxes], Overlaps]:
        """Split the needed boxes into parts that fit a round, and number the rounds; return the parts."""
        tables, overlaps = self._cut(uncut, np.ones(len(self.names), np.int64)), whole
        parts = self._count_parts(Loads.join(self._receive_loads(tables)))
        for is_first in (True, False):  # because of what ranks receive, and because of what they pack
            if (parts > self._parts).any():
                tables = self._cut(uncut, parts)
                overlaps = self._intersect(tables, large_bytes)
            elif not is_first:
                break
            loads = self._loads(tables, overlaps)
            parts = self._count_parts(loads)
        self._round_of_item: Ints = cut_rounds(loads, int(self._parts.sum()), self.round_bytes)
        self.num_rounds: int = int(self._round_of_item.max(initial=-1)) + 1
        return tables, overlaps

    def _cut(self, tables: Sequence[Boxes], parts: Ints) -> list[Boxes]:
        """Split the boxes of every tensor into `parts`, and number the parts of all tensors in transfer order."""
        by_transfer_order = np.argsort(self.order)
        self._parts, self._first_item = parts, np.empty(len(parts), np.int64)
        self._first_item[by_transfer_order] = np.cumsum(parts[by_transfer_order]) - parts[by_transfer_order]
        self._tensor_of_item = np.repeat(by_transfer_order, parts[by_transfer_order])
        return [split_boxes(table, parts) for table in tables]

    def _count_parts(self, loads: Loads) -> Ints:
        """Return, by tensor, the number of parts its boxes are to be split into: at most one per row of the tensor."""
        rows = np.array([spec.shape[0] if spec.shape else 1 for spec in self.specs], np.int64)
        tensor = self._tensor_of_item[loads.item]
        parts = self._parts.copy()
        np.maximum.at(parts, tensor, np.minimum(self._parts[tensor] * loads.num_parts(self.round_bytes), rows[tensor]))
        return parts

    def _receive_loads(self, tables: Sequence[Boxes]) -> list[Loads]:
        """Return what the ranks of each class receive, including what they hold themselves."""
        loads = []
        for table in tables:
            size = volumes(table) * self.itemsize[table.tensor]
            item = self.item_of(table.tensor, table.part)
            loads.append(Loads.of(np.zeros_like(item), item, size, table.stop[:, 0] - table.start[:, 0]))
        return loads

    def _intersect(self, tables: Sequence[Boxes], large_bytes: int) -> Overlaps:
        """Return what ranks hold of the needed boxes."""
        relays = self.relay and len(set(self.topology.nodes)) > 1
        if relays and len(tables) > 1:
            receivers, sets = find_receiver_sets(tables, self._ranks, self.width)
        else:  # it does not matter which other ranks need the box
            receivers, sets = [np.full(len(t.tensor), number) for number, t in enumerate(tables)], list(self._ranks)
        pairs = np.zeros((len(self.holders), len(sets)), bool)
        packed = []
        for table, to in zip(tables, receivers, strict=True):
            at, of, low, high = intersections(table, self.held, self.held_start, self.held_count)
            pairs[self.held_by[of], to[at]] = True
            size = (high - low).prod(axis=1) * self.itemsize[table.tensor[at]]
            is_small = size < large_bytes
            rows = np.flatnonzero(is_small | ~are_contiguous(low, high, self._held_extent[of]))
            packed.append(Overlap(at[rows], of[rows], low[rows], high[rows], size[rows], is_small[rows]))
        traffic = RemoteTraffic(self.topology, self.holders, sets, pairs) if relays else None
        return Overlaps(receivers, sets, packed, traffic)

    def _loads(self, tables: Sequence[Boxes], overlaps: Overlaps) -> Loads:
        """Return what ranks receive, pack and relay, whichever of equally good sources are chosen."""
        fan_out = FanOut(self.topology.nodes, self.groups, relay=self.relay, remote=self.remote)
        packed, relayed = [], []
        for table, receivers, some in zip(tables, overlaps.receivers, overlaps.packed, strict=True):
            to, item = receivers[some.at], self.item_of(table.tensor[some.at], table.part[some.at])
            sends, relays = self._fan_outs(fan_out, overlaps.receiver_sets, self.held_by[some.of], to, some.is_small)
            height = some.high[:, 0] - some.low[:, 0]
            relayed.append(Loads.of(np.zeros_like(item), item, some.size * relays, height))
            # a large box is packed once for the receivers of all classes
            key = np.where(some.is_small, to, -1)
            packed.append(np.column_stack([some.of, item, some.size * sends, height, key, some.low, some.high]))
        every = np.concatenate([np.zeros((0, 5 + 2 * self.width), np.int64), *packed])
        _, once = np.unique(hash_rows([every[:, 0], *every[:, 4:].T]), return_index=True)
        of, item, num_bytes, height = every[once, :4].T
        # every layout that holds the box
        of_layout, first, count = self._holding_layouts
        row = np.repeat(np.arange(len(of)), count[of])
        layout = of_layout[np.arange(len(row)) + (first[of] - np.cumsum(count[of]) + count[of])[row]]
        sent = Loads.of(layout, item[row], num_bytes[row], height[row])
        return Loads.join([*self._receive_loads(tables), sent, *relayed])

    def _fan_outs(
        self, fan_out: FanOut, receiver_sets: Sequence[Ranks], holders: Ints, receivers: Ints, is_small: Ints
    ) -> tuple[Ints, Ints]:
        """Return, by box [N], how often its holder and the rank that fetches it pack it for other ranks, at most."""
        sends, relays = np.ones(len(holders), np.int64), np.zeros(len(holders), np.int64)
        small = np.flatnonzero(is_small)
        if len(small):
            pairs, number = np.unique(np.column_stack([holders[small], receivers[small]]), axis=0, return_inverse=True)
            sets = [(self.holders[of], receiver_sets[to]) for of, to in pairs.tolist()]
            sends[small] = np.array([fan_out.of_holder(*pair) for pair in sets])[number.reshape(-1)]
            relays[small] = np.array([fan_out.of_fetcher(*pair) for pair in sets])[number.reshape(-1)]
        return sends, relays

    def item_of(self, tensor: Ints, part: Ints) -> Ints:
        """Return the index of each tensor part among all parts, in transfer order."""
        items: Ints = self._first_item[tensor] + part
        return items

    def round_of(self, tensor: Ints, part: Ints) -> Ints:
        """Return the round in which each tensor part is sent."""
        rounds: Ints = self._round_of_item[self.item_of(tensor, part)]
        return rounds

    # -- source selection

    def source_selector(self, holders: int, receivers: int) -> SourceSelector:
        """Return the selector for the holder set and the receiver set of these indices; built once and cached."""
        key = holders, receivers
        if key not in self._source_selectors:
            self._source_selectors[key] = SourceSelector(
                self.holders[holders],
                self.receiver_sets[receivers],
                self.topology,
                self.group_of,
                relay=self.relay,
                remote=self.remote,
                entry=self._entries.of(holders, receivers) if self._entries is not None else None,
            )
        return self._source_selectors[key]
