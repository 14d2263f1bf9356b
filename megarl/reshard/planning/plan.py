"""One rank's part of a sync: what it keeps, sends, receives and hands on, round by round.

A pure function of the tables in `megarl.reshard.layout.box_index`, and of no other rank's plan: both ends of a
message derive its content in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.errors import WeightSyncError
from megarl.reshard.layout.box_index import Boxes, Ints, NeedClass, SyncIndex, extents, intersections
from megarl.reshard.layout.topology import TURNS

HOPS = 2
"""From a holder, and from the rank that fetched a box for its machine."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Boxes that one rank sends, or receives, in the order in which messages carry them. Arrays of n."""

    round: Ints
    hop: Ints
    peer: Ints
    """The other rank; the rank itself for what it holds."""
    tensor: Ints
    start: Ints
    """[n, D], in the tensor's coordinates."""
    stop: Ints
    local: Ints
    """Number of the name in this rank's own tensors; -1: it is in the bucket, having been received in this round."""
    shift: Ints
    """[n, D], from the tensor's coordinates to the local tensor's."""
    num_bytes: Ints
    item: Ints
    """Number of the tensor's part in the order of travel."""

    def take(self, rows: Ints) -> Moves:
        """Some of them."""
        return Moves(*(getattr(self, name)[rows] for name in Moves.__slots__))

    def __len__(self) -> int:
        return len(self.round)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does."""

    rank: int
    num_rounds: int
    """The same on every rank."""
    receives: Moves
    """Also of what the rank itself holds."""
    held: Boxes
    """What it holds of `receives` from itself: the box on the trainer's side, row for row with `own`."""
    own: Ints
    """Rows of `receives` that come from the rank itself."""
    sends: Moves
    gathered: Ints
    """bool by row of `receives`: travels in an all-gather of the rank's group."""
    group: tuple[int, ...]
    """The ranks of that group."""

    @property
    def bytes_received(self) -> int:
        """From other ranks."""
        return int(self.receives.num_bytes[self.receives.peer != self.rank].sum())


def plan_rank(index: SyncIndex, rank: int) -> RankPlan:
    """Rank `rank`'s plan.

    Raises:
        WeightSyncError: no rank holds an element that it needs; names the tensor and the box.
    """
    mine, held_rows = index.held_by_rank(rank)
    receives, own, own_boxes = _receives(index, rank, mine, held_rows)
    gathered, group = _find_gathers(index, rank, receives)
    sends = _sends(index, rank, mine, held_rows)
    if gathered.any():
        travels = np.isin(sends.item, np.unique(receives.item[gathered])) & np.isin(sends.peer, group)
        sends = sends.take(np.flatnonzero(~travels))
    return RankPlan(rank, index.num_rounds, receives, own_boxes, own, sends, gathered, group)


def _receives(index: SyncIndex, rank: int, mine: Boxes, held_rows: Ints) -> tuple[Moves, Ints, Boxes]:
    number = index.class_of.get(rank)
    if number is None:
        return _nothing(index.width), np.zeros(0, np.int64), mine.take(np.zeros(0, np.int64))
    need = index.classes[number]
    at, of, low, high = intersections(need.boxes, index.held, index.held_start, index.held_count)
    _demand_all(index, rank, need.boxes, at, low, high)
    turn = _turns(index, need, at, of, low, high)
    peer, hop = np.empty(len(at), np.int64), np.empty(len(at), np.int64)
    for rows, (holders, audience, now) in _alike(index.held_by[of], need.audience[at], turn):
        peer[rows], hop[rows] = index.fan(holders, audience).source(rank, now)
    moves = _moves(index, peer, hop, need.boxes, at, low, high)
    order = _message_order(index, moves)
    moves, of = moves.take(order), of[order]
    own = np.flatnonzero(moves.peer == rank)
    return moves, own, mine.take(np.searchsorted(held_rows, of[own]))


def _sends(index: SyncIndex, rank: int, mine: Boxes, held_rows: Ints) -> Moves:
    """Of what it holds, and of what it fetches for its machine."""
    found = []
    own_start, own_count = extents(mine.tensor, len(index.names))
    fetches_for = _audiences_to_relay(index, rank) if index.relay and rank in index.class_of else ()
    for need in index.classes:
        some = np.flatnonzero(own_count[need.boxes.tensor])
        found += _served(index, rank, need, some, mine, own_start, own_count, held_rows, hop=0)
        if len(fetches_for) and any(index.topology.same_node(rank, r) and r != rank for r in need.ranks):
            shared = np.flatnonzero(np.isin(need.audience, fetches_for))
            found += _served(index, rank, need, shared, index.held, index.held_start, index.held_count, None, hop=1)
    if not found:
        return _nothing(index.width)
    moves = Moves(*(np.concatenate([getattr(m, name) for m in found]) for name in Moves.__slots__))
    return moves.take(_message_order(index, moves))


def _served(
    index: SyncIndex,
    rank: int,
    need: NeedClass,
    rows: Ints,
    held: Boxes,
    start: Ints,
    count: Ints,
    held_rows: Ints | None,
    *,
    hop: int,
) -> list[Moves]:
    """What `rank` sends to the ranks of `need`, of the boxes `rows`."""
    boxes = need.boxes.take(rows)
    at, of, low, high = intersections(boxes, held, start, count)
    if not len(at):
        return []
    number = of if held_rows is None else held_rows[of]
    turn = _turns(index, need, rows[at], number, low, high)
    pairs, peers = [], []
    for same, (holders, audience, now) in _alike(index.held_by[number], need.audience[rows[at]], turn):
        to = index.fan(holders, audience).served_by(rank, now, hop=hop, among=need.ranks)
        pairs.append(np.tile(same, len(to)))
        peers.append(np.repeat(np.array(to, np.int64), len(same)))
    pair, peer = np.concatenate(pairs), np.concatenate(peers)
    order = np.lexsort((pair, peer))
    pair, peer = pair[order], peer[order]
    moves = _moves(index, peer, np.full(len(pair), hop), boxes, at[pair], low[pair], high[pair])
    if hop == 0:
        return [_from(moves, held.local[of[pair]], held.shift[of[pair]])]
    return [_from(moves, np.full(len(pair), -1), np.zeros_like(moves.shift))]


def _audiences_to_relay(index: SyncIndex, rank: int) -> Ints:
    """Numbers of the audiences that have `rank` and another rank of its machine."""
    return np.array(
        [
            number
            for number, ranks in enumerate(index.audiences)
            if rank in ranks and sum(index.topology.same_node(rank, r) for r in ranks) > 1
        ],
        np.int64,
    )


def _find_gathers(index: SyncIndex, rank: int, receives: Moves) -> tuple[Ints, tuple[int, ...]]:
    """Which receives an all-gather of the rank's group brings: each member holds one part of the item, all equal.

    Members need the same and hold disjoint boxes, so all of them find the same.
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
    stray = np.zeros(items, bool)
    stray[receives.item[~inside | (receives.hop > 0)]] = True
    size = index.itemsize[receives.tensor]
    common = np.bincount(size, weights=receives.num_bytes).argmax()  # one element size: parts need no padding
    stray[receives.item[size != common]] = True
    # of what several members hold, each keeps its own: no member would know what another lacks
    stray[receives.item[np.isin(receives.tensor, _held_twice(index, group))]] = True
    even = (share == share[:, :1]).all(axis=1) & (share[:, 0] > 0) & ~stray
    return even[receives.item], group


def _held_twice(index: SyncIndex, group: tuple[int, ...]) -> Ints:
    """Tensors of which two members of the group hold the same box."""
    twice = np.array([len(set(group) & set(ranks)) > 1 for ranks in index.holders], bool)
    return np.unique(index.held.tensor[twice[index.held_by]])


def _turns(index: SyncIndex, need: NeedClass, at: Ints, of: Ints, low: Ints, high: Ints) -> Ints:
    """A number that spreads boxes over equal holders; of the box alone, so that every rank finds the same."""
    tensor = need.boxes.tensor[at]
    place = (low // np.maximum(high - low, 1)).sum(axis=1)
    turns: Ints = (index.order[tensor] + of - index.held_start[tensor] + place) % TURNS
    return turns


def _alike(*columns: Ints) -> list[tuple[Ints, tuple[int, ...]]]:
    """Rows that agree in all columns, and what they agree on."""
    if not len(columns[0]):
        return []
    order = np.lexsort(columns[::-1])
    rows = np.column_stack(columns)[order]
    starts = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)])
    values = rows[starts].tolist()
    return [(same, tuple(v)) for same, v in zip(np.split(order, starts[1:]), values, strict=True)]


def _moves(index: SyncIndex, peer: Ints, hop: Ints, need: Boxes, at: Ints, low: Ints, high: Ints) -> Moves:
    tensor, part = need.tensor[at], need.part[at]
    return Moves(
        index.round_of(tensor, part),
        hop,
        peer,
        tensor,
        low,
        high,
        need.local[at],
        need.shift[at],
        (high - low).prod(axis=1) * index.itemsize[tensor],
        index.item_of(tensor, part),
    )


def _from(moves: Moves, local: Ints, shift: Ints) -> Moves:
    """The same moves, at the other end."""
    fields = {name: getattr(moves, name) for name in Moves.__slots__}
    return Moves(**(fields | {"local": local, "shift": shift}))


def _message_order(index: SyncIndex, moves: Moves) -> Ints:
    """By round, hop and peer; in a message wide elements first, so that every box is aligned to its elements."""
    order: Ints = np.lexsort((-index.itemsize[moves.tensor], moves.peer, moves.hop, moves.round))
    return order


def _demand_all(index: SyncIndex, rank: int, need: Boxes, at: Ints, low: Ints, high: Ints) -> None:
    missing = (need.stop - need.start).prod(axis=1)
    np.subtract.at(missing, at, (high - low).prod(axis=1))
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        tensor = int(need.tensor[row])
        dims = len(index.specs[tensor].shape)
        box = tuple(zip(need.start[row, :dims].tolist(), need.stop[row, :dims].tolist(), strict=True))
        raise WeightSyncError(
            f"{index.names[tensor]}: rank {rank} needs {box}, of which no trainer rank holds {missing[row]} elements"
        )


def _nothing(width: int) -> Moves:
    flat, boxes = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
    return Moves(flat, flat, flat, flat, boxes, boxes, flat, boxes, flat, flat)
