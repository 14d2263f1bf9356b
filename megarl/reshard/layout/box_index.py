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
from megarl.reshard.layout.layout import (
    Boxes,
    Ints,
    PieceTable,
    WeightLayout,
    all_columns,
    check_dtypes,
    count_up,
    extents,
    hash_rows,
    intersections,
    local_extents,
    merge_specs,
    volumes,
    widen,
)
from megarl.reshard.layout.model_tensors import Names, numbers_among
from megarl.reshard.layout.rank_sets import find_rank_sets, find_receiver_sets, group_ranks
from megarl.reshard.layout.relay_tree import Ranks, RemoteSources
from megarl.reshard.layout.remote_traffic import MAX_REMOTE_PEERS, RemoteTraffic, RingEntries
from megarl.reshard.layout.slices import Loads, Slices, Stages, are_contiguous, cut_rounds, share_buffers
from megarl.reshard.layout.topology import SourceSelector, Topology

SLICES_PER_ROUND = 96
"""A rank receives about as many slices of stages in a round, at most."""

MAX_LANES = 32
"""The most rounds that the slice of a stage of few slices is spread over, by receivers."""

MAX_HOLDER_SHARE = 1.05
"""The most slices of a stage that a holder sends, over the mean."""

MAX_MESSAGES, MAX_MESSAGES_OF_FEW = 8192, 16384
"""About the most slices of stages that a rank receives in a sync, and the most boxes that are messages of their own;
the same for up to `MAX_REMOTE_PEERS` ranks, of which each needs a larger part of the model."""


@dataclass(frozen=True, slots=True)
class NeedClass:
    """Ranks that need the same boxes, and the N parts of these that ranks hold: arrays [N], or [N, D]."""

    ranks: Ranks
    boxes: Boxes
    locals: tuple[str, ...]
    receivers: Ints
    """By box, all ranks of all classes that need exactly this box: an index into `SyncIndex.receiver_sets`."""
    at: Ints
    """Row of the needed box."""
    of: Ints
    """Row of the held box in `SyncIndex.held`."""
    low: Ints
    high: Ints


class SyncIndex:
    """Index tables of one sync, identical on every rank."""

    def __init__(
        self,
        sources: Sequence[WeightLayout],
        needs: Mapping[int, WeightLayout],
        topology: Topology,
        *,
        groups: Sequence[Sequence[int]] = (),
        bucket_bytes: int,
        large_bytes: int,
    ) -> None:
        """Build the tables from the layouts of both sides.

        Args:
            sources: by rank, the layout it holds.
            needs: by rank, the layout it has to receive.
            groups: ranks that prefer to receive from each other, such as micro-DP groups.
            bucket_bytes: half of the memory for all buffers of a rank; a single row of a box is never split.
            large_bytes: a box of at least this size is a message of its own, unless a rank would then have more than
                `MAX_MESSAGES` of them.

        Raises:
            WeightSyncError: ranks have the same tensor in different dtypes.
        """
        self.topology, self.groups = topology, tuple(map(tuple, groups))
        self.group_of = {rank: index for index, group in enumerate(self.groups) for rank in group}
        self._source_selectors: dict[tuple[int, int], SourceSelector] = {}
        self.sources, self.needs = sources, needs
        ranks = sorted(needs)
        layouts = group_ranks([needs[rank] for rank in ranks], ranks, lambda layout: layout.digest)
        specs = merge_specs(layout for layout, _ in layouts)
        check_dtypes({"engines": [layout for layout, _ in layouts], "trainer ranks": sources})
        self.names, self.specs = Names(specs), tuple(specs.values())
        self.itemsize = np.array([itemsize(spec.dtype) for spec in self.specs], np.int64)
        self.width = max((len(spec.shape) for spec in self.specs), default=1) or 1
        self._index_sources(sources)
        self.classes, self.receiver_sets = self._find_classes(layouts)
        self.class_of = {rank: number for number, each in enumerate(self.classes) for rank in each.ranks}
        self.stages = self._find_stages()
        bytes_of = self._stage_bytes()
        needed = int(bytes_of.sum(axis=1).max(initial=0))
        are_few = len(topology.nodes) <= MAX_REMOTE_PEERS
        self._min_bytes = needed // (MAX_MESSAGES_OF_FEW if are_few else MAX_MESSAGES)
        """Bytes of the smallest slices, if they were equally large."""
        self.large_bytes = max(large_bytes, self._min_bytes)
        """A box of at least this size is a message of its own."""
        traffic = self._find_traffic()
        self.remote: RemoteSources = traffic.limit()
        self.num_hops: int = traffic.num_hops(self.remote)
        self._entries = RingEntries.choose(traffic, self.remote)
        self._cut_to_fit(bytes_of, needed, traffic.num_turns(self.remote), bucket_bytes)

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
        every = Boxes.join(tables)
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

    def _boxes(self, table: PieceTable) -> Boxes:
        """Return the table's boxes of needed tensors, sorted by tensor."""
        columns = table.columns
        tensor = numbers_among(table.tensors, self.names)[columns.tensor]
        rows = np.argsort(tensor, kind="stable")
        rows = rows[tensor[rows] >= 0]
        box = widen(columns.boxes[rows, : self.width], self.width).astype(np.int64)
        local = widen(columns.local_boxes[rows, : self.width], self.width)
        return Boxes(
            tensor[rows],
            box[..., 0],
            box[..., 1],
            local[..., 0] - box[..., 0],
            columns.local[rows].astype(np.int64),
        )

    def held_by_rank(self, rank: int) -> tuple[Boxes, Ints]:
        """Return the boxes that `rank` holds, and the row of each in `held`."""
        mine = self._boxes(self.sources[rank].pieces)
        at, of, _, _ = intersections(mine, self.held, self.held_start, self.held_count)
        same = all_columns((mine.start[at] == self.held.start[of]) & (mine.stop[at] == self.held.stop[of]))
        at, of = at[same], of[same]
        _, once = np.unique(of, return_index=True)  # the same box may be held under two names
        return mine.take(at[once]), of[once]

    # -- needs

    def _find_classes(self, layouts: Sequence[tuple[WeightLayout, Ranks]]) -> tuple[list[NeedClass], list[Ranks]]:
        """Return the class of each needed layout and its ranks, and the sets of ranks that need the same boxes.

        On a single node it does not matter which other classes need the same box: the sets are those of the classes.
        """
        tables, sets = [self._boxes(layout.pieces) for layout, _ in layouts], [ranks for _, ranks in layouts]
        receivers = [np.full(len(table.tensor), number) for number, table in enumerate(tables)]
        if len(self.topology.ranks_of) > 1 and len(tables) > 1:
            receivers, sets = find_receiver_sets(tables, sets)
        classes = []
        for (layout, ranks), table, to in zip(layouts, tables, receivers, strict=True):
            parts = intersections(table, self.held, self.held_start, self.held_count)
            classes.append(NeedClass(ranks, table, layout.pieces.locals.strings, to, *parts))
        return classes, sets

    def _find_stages(self) -> Stages:
        """Return the stages of tensors: those whose boxes the same sets of ranks hold, and the same sets need.

        No stage has bytes that nobody needs. Experts of one rank that different ranks need are different stages, so
        that each of these ranks receives some of them in every round; and so are tensors of the same ranks that have
        boxes for each of the ranks and those that all of them need.
        """
        held, num_tensors = self.held, len(self.names)
        size = np.bincount(held.tensor, volumes(held.start, held.stop) * self.itemsize[held.tensor], num_tensors)
        nothing = np.zeros(0, np.int64)
        tensors = np.concatenate([nothing, *(need.boxes.tensor for need in self.classes)])
        needed_by = self._hash_sets(tensors, np.concatenate([nothing, *(need.receivers for need in self.classes)]))
        size[needed_by == 0] = 0
        first = np.minimum(self.held_start, max(len(self.held_by) - 1, 0))
        holders = np.where(self.held_count > 0, self.held_by[first] if len(self.held_by) else 0, len(self.holders))
        num_ranks = np.array([*map(len, self.holders), 1], np.int64)
        alike = hash_rows([needed_by, self._hash_sets(held.tensor, self.held_by)])
        return Stages.of(holders, alike, size.astype(np.int64), num_ranks)

    def _hash_sets(self, tensor: Ints, sets: Ints) -> Ints:
        """Return, by tensor, a hash of the sets of ranks of its boxes [N], given by the indices `sets`; 0: of none.

        It may depend on how often other sets come between boxes of a set, in the order of the boxes.
        """
        is_first = np.ones(len(tensor), bool)
        is_first[1:] = (tensor[1:] != tensor[:-1]) | (sets[1:] != sets[:-1])
        found = np.zeros(len(self.names), np.uint64)
        np.add.at(found, tensor[is_first], hash_rows([np.arange(1, sets.max(initial=0) + 2)])[sets[is_first]])
        return found

    def _cut_to_fit(self, bytes_of: Ints, needed: int, per_round: int, bucket_bytes: int) -> None:
        """Cut the tensors into slices and number the rounds, so that no rank's load of a round exceeds the limits.

        Args:
            bytes_of: as `_stage_bytes` returns.
            needed: the most bytes that a rank needs.
            per_round: the most slices of a stage in one round.
        """
        self.round_bytes, _ = share_buffers(bucket_bytes, self.num_hops, needed, 0)
        """The most that a rank receives in one round."""
        num_rounds, count = max(-(-needed // self.round_bytes), 1), np.array([-1])
        num_lanes = 1 if self.groups else min(len(self.receiver_sets), MAX_LANES)
        while True:
            before, count = count, self._count_slices(bytes_of, num_rounds, per_round)
            self.slices = Slices(self.stages, count, bytes_of.sum(axis=0), num_rounds, num_lanes)
            is_same = np.array_equal(count, before)
            if not is_same:
                received, packed = self._loads()
            most = received.largest(self.slices.round), packed.largest(self.slices.round)
            self.round_bytes, self.staging_bytes = share_buffers(bucket_bytes, self.num_hops, *most)
            """The most that a rank packs in one round."""
            worst = max(most[0] / self.round_bytes, most[1] / self.staging_bytes)
            if worst <= 1 or is_same:
                break
            num_rounds = int(np.ceil(num_rounds * min(worst, 2) * 1.01))
        limited = [(received, self.round_bytes), (packed, self.staging_bytes)]
        self._round_of_place = cut_rounds(self.slices.round, self.slices.order, limited)
        self.num_rounds: int = int(self._round_of_place.max(initial=-1)) + 1

    def _stage_bytes(self) -> Ints:
        """Return [classes, stages], the bytes that a rank of each class needs."""
        count = len(self.stages.total)
        found = np.zeros((len(self.classes), count))
        for row, t in zip(found, (need.boxes for need in self.classes), strict=True):
            row += np.bincount(self.stages.stage[t.tensor], volumes(t.start, t.stop) * self.itemsize[t.tensor], count)
        return found

    def _count_slices(self, bytes_of: Ints, num_rounds: int, per_round: int) -> Ints:
        """Return, by stage, the number of its slices, at most `per_round` in a round; others as of `_cut_to_fit`."""
        least = max(self.round_bytes // SLICES_PER_ROUND, self._min_bytes, 1)
        most = np.maximum(bytes_of.max(axis=0, initial=0) // least, 1).astype(np.int64)
        whole: Ints = np.minimum(np.maximum(most // num_rounds, 1), per_round) * num_rounds
        # with few slices, what matters is that the stage's holders have equally many
        count = np.where(most < num_rounds, most, whole)
        each = np.minimum(self.stages.num_holders, count)
        even: Ints = count - count % each
        return np.where((most < num_rounds) | (-(-count // each) * each > MAX_HOLDER_SHARE * count), even, count)

    def _find_traffic(self) -> RemoteTraffic:
        """Return which ranks need boxes of which."""
        pairs = np.zeros((len(self.holders), len(self.receiver_sets)), np.int64)
        for need in self.classes:
            size = volumes(need.low, need.high) * self.itemsize[need.boxes.tensor[need.at]]
            np.add.at(pairs, (self.held_by[need.of], need.receivers[need.at]), size)
        return RemoteTraffic(self.topology, self.holders, self.receiver_sets, pairs)

    def cut(self, need: NeedClass, parts: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut held parts of the boxes that a class needs, given by their indices [M], at the edges of the slices.

        Returns:
            for each part of a part: its index, start, stop and item.
        """
        at, boxes = need.at[parts], need.boxes
        first, last = boxes.start[at, 0], boxes.stop[at, 0]
        row, low, high, item = self.slices.cut(boxes.tensor[at], need.low[parts], need.high[parts], first, last)
        return parts[row], low, high, item

    def _loads(self) -> tuple[Loads, Loads]:
        """Return what ranks receive, and what they pack, whichever of equally good sources are chosen."""
        sets = np.concatenate([np.zeros(0, np.int64), *(np.unique(need.receivers) for need in self.classes)])
        in_classes = np.bincount(sets, minlength=len(self.receiver_sets))
        received, packed, several = [Loads(*np.zeros((3, 0), np.int64))], [], [np.zeros((4, 0), np.int64)]
        for number, need in enumerate(self.classes):
            part, low, high, item = self.cut(need, np.arange(len(need.at)))
            at, of = need.at[part], need.of[part]
            to = need.receivers[at]
            place = self.slices.place(item, to)
            size = volumes(low, high) * self.itemsize[need.boxes.tensor[at]]
            received.append(Loads(np.full_like(place, number), place, size))
            is_small = size < self.large_bytes
            is_packed = is_small | ~are_contiguous(low, high, self._held_extent[of])
            is_once = is_small & (in_classes[to] == 1)
            some = np.flatnonzero(is_packed & is_once)
            packed.append(self._packing(of[some], place[some], size[some]))
            # a box is packed once for the receivers of several classes, a large one for all of them
            some = np.flatnonzero(is_packed & ~is_once)
            key = hash_rows([np.where(is_small[some], to[some], -1), *low[some].T, *high[some].T])
            several.append(np.array([of[some], place[some], size[some], key.view(np.int64)]))
        of, place, size, key = np.concatenate(several, axis=1)
        _, once = np.unique(hash_rows([of, place, key]), return_index=True)
        packed.append(self._packing(of[once], place[once], size[once]))
        return Loads.join(received), Loads.join(packed)

    def _packing(self, of: Ints, place: Ints, size: Ints) -> Loads:
        """Return what the layouts that hold N boxes pack.

        Args:
            of: [N], row of the held box.
            place: [N], where it is in transfer order.
            size: [N], bytes.
        """
        of_layout, first, count = self._holding_layouts
        row, at = count_up(first[of], count[of])
        return Loads(of_layout[at], place[row], size[row])

    def round_of(self, item: Ints, receivers: Ints) -> Ints:
        """Return the round in which each slice of a tensor is sent to the set of receivers of this index."""
        rounds: Ints = self._round_of_place[self.slices.place(item, receivers)]
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
                remote=self.remote,
                entry=self._entries.of(holders, receivers),
            )
        return self._source_selectors[key]
