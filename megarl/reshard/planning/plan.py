"""The plan of one rank for a sync: the boxes it copies, sends, receives and relays, round by round.

The plan is a pure function of the tables in `megarl.reshard.layout.box_index`. It does not depend on other ranks'
plans: both ends of a message derive its content in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.errors import WeightSyncError
from megarl.reshard.layout.box_index import NeedClass, SyncIndex
from megarl.reshard.layout.layout import ArrayTable, Boxes, Ints, volumes


@dataclass(frozen=True, slots=True)
class Moves(ArrayTable):
    """N boxes that one rank sends or receives, in message order: arrays [N] unless noted."""

    round: Ints
    hop: Ints
    """0: from a holder; h + 1: from a rank that relays what it received in hop h."""
    peer: Ints
    """The other rank; the rank itself for boxes that it holds."""
    tensor: Ints
    start: Ints
    """[N, D], in the tensor's coordinates."""
    stop: Ints
    local: Ints
    """Index of the name among this rank's local tensors; -1: the box was received into the bucket in this round."""
    shift: Ints
    """[N, D], offset from the tensor's coordinates to the local tensor's."""
    num_bytes: Ints
    item: Ints
    """Index of the slice of the tensor."""
    path: Ints
    """Number of the box's path: boxes with the same holders, receivers and turn pass the same ranks."""

    def __len__(self) -> int:
        return len(self.round)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """All moves of one rank."""

    rank: int
    num_rounds: int
    """Number of rounds, the same on every rank."""
    num_hops: int
    """Number of hops of every round, the same on every rank."""
    receives: Moves
    """Boxes that the rank needs, including those it holds itself."""
    held: Moves
    """Those of `receives` whose peer is the rank itself, with the local tensors that it holds them in."""
    sends: Moves
    gathered: Ints
    """bool, by row of `receives`: received through an all-gather of the rank's group."""
    group: tuple[int, ...]
    """Ranks of the all-gather group, ascending; empty without one."""

    @property
    def bytes_received(self) -> int:
        """Bytes received from other ranks."""
        return int(self.receives.num_bytes[self.receives.peer != self.rank].sum())


def plan_rank(index: SyncIndex, rank: int) -> RankPlan:
    """Return the plan of rank `rank`.

    Raises:
        WeightSyncError: no rank holds an element that this rank needs; names the tensor and the box.
    """
    mine, held_rows = index.held_by_rank(rank)
    receives, held = _receives(index, rank, mine, held_rows)
    gathered, group = _find_gathers(index, rank, receives)
    sends = _without_gathered(_sends(index, rank, mine, held_rows), receives.item[gathered], group)
    return RankPlan(rank, index.num_rounds, index.num_hops, receives, held, sends, gathered, group)


def plan_sends(index: SyncIndex, rank: int, to: Collection[int]) -> Moves:
    """Return those of the plan's sends that go to the ranks `to`, much faster than the whole plan if these are few."""
    mine, held_rows = index.held_by_rank(rank)
    sends = _sends(index, rank, mine, held_rows, to)
    if rank not in index.group_of:
        return sends
    receives, _ = _receives(index, rank, mine, held_rows)
    gathered, group = _find_gathers(index, rank, receives)
    return _without_gathered(sends, receives.item[gathered], group)


def _without_gathered(sends: Moves, items: Ints, group: tuple[int, ...]) -> Moves:
    """Return the sends without those to ranks of the group of items that it all-gathers."""
    return sends.take(~(np.isin(sends.item, items) & np.isin(sends.peer, group)))


def _receives(index: SyncIndex, rank: int, mine: Boxes, held_rows: Ints) -> tuple[Moves, Moves]:
    """Return `RankPlan.receives` and `RankPlan.held`."""
    if rank not in index.class_of:
        return _no_moves(index.width), _no_moves(index.width)
    need = index.classes[index.class_of[rank]]
    _check_complete(index, rank, need)
    part, low, high, item = index.cut(need, np.arange(len(need.at)))
    at, of, turns = need.at[part], need.of[part], index.slices.turn[item]
    peer, hop = np.empty(len(at), np.int64), np.empty(len(at), np.int64)
    for rows, holders, receivers in _group_rows(index, index.held_by[of], need.receivers[at]):
        peer[rows], hop[rows] = index.source_selector(holders, receivers).sources(rank, turns[rows])
    moves = _make_moves(index, need, part, low, high, item, peer, hop, need.boxes.local[at], need.boxes.shift[at])
    order = _message_order(index, moves)
    moves, of = moves.take(order), of[order]
    own = moves.peer == rank
    held = mine.take(np.searchsorted(held_rows, of[own]))
    return moves, replace(moves.take(own), local=held.local, shift=held.shift)


def _sends(index: SyncIndex, rank: int, mine: Boxes, held_rows: Ints, to: Collection[int] | None = None) -> Moves:
    """Return what `rank` sends to the ranks `to`, None for all: boxes that it holds, and that it fetches and relays."""
    found = [_no_moves(index.width)]
    holds = np.array([rank in ranks for ranks in index.holders], bool)
    relays = np.array([rank in ranks and len(ranks) > 1 for ranks in index.receiver_sets], bool)
    for need in index.classes:
        peers = need.ranks if to is None else [peer for peer in need.ranks if peer in to]
        if peers:
            parts = np.flatnonzero(holds[index.held_by[need.of]] | relays[need.receivers[need.at]])
            found.append(_sends_to_class(index, rank, need, peers, parts, mine, held_rows))
    moves = Moves.join(found)
    return moves.take(_message_order(index, moves))


def _sends_to_class(
    index: SyncIndex, rank: int, need: NeedClass, peers: Sequence[int], parts: Ints, mine: Boxes, held_rows: Ints
) -> Moves:
    """Return what `rank` sends to `peers`, ranks of `need`, of held parts of its boxes, given by their indices."""
    part, low, high, item = index.cut(need, parts)
    of, turns = need.of[part], index.slices.turn[item]
    found = [(np.zeros(0, np.int64),) * 3]
    for same, holders, receivers in _group_rows(index, index.held_by[of], need.receivers[need.at[part]]):
        sent, to, hops = index.source_selector(holders, receivers).sends(rank, turns[same], peers)
        found.append((same[sent], to, hops))
    row, peer, hop = (np.concatenate(column) for column in zip(*found, strict=True))
    low, of = low[row], of[row]
    local, shift = np.full(len(row), -1), np.zeros_like(low)
    own = np.flatnonzero(np.isin(of, held_rows))
    place = np.searchsorted(held_rows, of[own])
    local[own], shift[own] = mine.local[place], mine.shift[place]
    return _make_moves(index, need, part[row], low, high[row], item[row], peer, hop, local, shift)


def _make_moves(
    index: SyncIndex,
    need: NeedClass,
    part: Ints,
    low: Ints,
    high: Ints,
    item: Ints,
    peer: Ints,
    hop: Ints,
    local: Ints,
    shift: Ints,
) -> Moves:
    """Return the moves of N parts of needed boxes, as `SyncIndex.cut` returns these; others as in `Moves`."""
    at = need.at[part]
    tensor, receivers = need.boxes.tensor[at], need.receivers[at]
    sizes = volumes(low, high) * index.itemsize[tensor]
    # depends on the box only, so all ranks agree
    path = (index.held_by[need.of[part]] * len(index.receiver_sets) + receivers) << 32 | index.slices.turn[item]
    rounds = index.round_of(item, receivers)
    return Moves(rounds, hop, peer, tensor, low, high, local, shift, sizes, item, path)


def _find_gathers(index: SyncIndex, rank: int, receives: Moves) -> tuple[Ints, tuple[int, ...]]:
    """Return which receives use an all-gather of the rank's group, and the group.

    An item is gathered if each member holds an equal share of it. Members need the same boxes and hold disjoint ones,
    so all of them find the same items.
    """
    none = np.zeros(len(receives), bool)
    group = tuple(sorted(index.groups[index.group_of[rank]])) if rank in index.group_of else ()
    if len(group) < 2 or len({index.class_of.get(member) for member in group}) > 1 or not len(receives):
        return none, ()
    place = np.searchsorted(group, receives.peer)
    inside = (place < len(group)) & (np.array([*group, -1])[np.minimum(place, len(group))] == receives.peer)
    items = int(receives.item.max()) + 1
    share = np.zeros((items, len(group)), np.int64)
    np.add.at(share, (receives.item[inside], place[inside]), receives.num_bytes[inside])
    excluded = np.zeros(items, bool)
    excluded[receives.item[~inside | (receives.hop > 0)]] = True
    size = index.itemsize[receives.tensor]
    common = np.bincount(size, weights=receives.num_bytes).argmax()  # a single element size: shares need no padding
    excluded[receives.item[size != common]] = True
    # a box held by several members is copied locally by each: a member does not know what another one misses
    excluded[receives.item[np.isin(receives.tensor, _find_tensors_held_twice(index, group))]] = True
    even = (share == share[:, :1]).all(axis=1) & (share[:, 0] > 0) & ~excluded
    return even[receives.item], group


def _find_tensors_held_twice(index: SyncIndex, group: tuple[int, ...]) -> Ints:
    """Return the tensors of which two members of the group hold the same box."""
    twice = np.array([len(set(group) & set(ranks)) > 1 for ranks in index.holders], bool)
    return np.unique(index.held.tensor[twice[index.held_by]])


def _group_rows(index: SyncIndex, holders: Ints, receivers: Ints) -> Iterator[tuple[Ints, int, int]]:
    """Yield the rows of each pair of holders and receivers, and the pair."""
    pair = holders * len(index.receiver_sets) + receivers
    order = np.argsort(pair, kind="stable")
    pairs, starts = np.unique(pair[order], return_index=True)
    for rows, each in zip(np.split(order, starts[1:]), pairs.tolist(), strict=False):
        yield rows, *divmod(each, len(index.receiver_sets))


def _message_order(index: SyncIndex, moves: Moves) -> Ints:
    """Return the order by round, hop, peer, path and descending element size, which aligns every box to its elements.

    Boxes of a message lie in the order of the tensors, so that a rank relays them as it received them.
    """
    columns = (*moves.start.T[::-1], moves.tensor, -index.itemsize[moves.tensor], moves.path)
    order: Ints = np.lexsort((*columns, moves.peer, moves.hop, moves.round))
    return order


def _check_complete(index: SyncIndex, rank: int, need: NeedClass) -> None:
    boxes = need.boxes
    missing = volumes(boxes.start, boxes.stop)
    np.subtract.at(missing, need.at, volumes(need.low, need.high))
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        tensor = int(boxes.tensor[row])
        dims = len(index.specs[tensor].shape)
        box = tuple(zip(boxes.start[row, :dims].tolist(), boxes.stop[row, :dims].tolist(), strict=True))
        raise WeightSyncError(
            f"{index.names[tensor]}: rank {rank} needs {box}, of which no trainer rank holds {missing[row]} elements"
        )


def _no_moves(width: int) -> Moves:
    flat, boxes = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
    return Moves(flat, flat, flat, flat, boxes, boxes, flat, boxes, flat, flat, flat)
