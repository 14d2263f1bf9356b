"""Cuts the tensors of a sync into slices, and these into rounds whose messages fit the buffers of every rank.

Tensors whose boxes the same sets of ranks hold and the same sets need form a stage, such as those of a pipeline stage
that are cut alike, or the experts of an expert-parallel rank that go to one rank of each engine. The bytes of a stage
lie on an axis, tensor after tensor, which is cut at equal distances. A tensor is cut where the axis is, at the rows
that are nearest, in the boxes of every rank alike:

    stage 0     | qkv .. | gate_up ........... | down ....... | qkv .. | gate_up
    slice       0       |   1       |   2       |   3       |   4       |   5
    stage 1     | gate_up ........... | down ....... | qkv .. | gate_up ...........
    round           0                  |           1           |           2            with two slices of a stage each

So all links are used in every round, as much as in the sync as a whole. The slices of a stage take turns among equally
good sources. A stage of few bytes takes part in some rounds only, others in the rounds between them.

    loads     by group of ranks and slice: the bytes that a rank receives, or packs to send
    rounds    consecutive slices, as many as fit: a load exceeds the limit only if it is that of a single slice

A rank packs a box into a staging buffer before it sends it, once for all its receivers, unless the box is large and
lies contiguously in the rank's tensor. What it relays, it sends from where it was received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.reshard.layout.layout import ArrayTable, Ints, count_up

PADDING = 1024
"""Bytes of each buffer reserved for alignment."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The tensors of each stage: arrays by tensor."""

    stage: Ints
    """Index of the stage, in the order of their first ranks."""
    offset: Ints
    """Bytes of the stage before the tensor."""
    size: Ints
    """Bytes of the tensor that are held, each element once."""
    total: Ints
    """By stage, its bytes."""
    num_holders: Ints
    """By stage, the number of ranks that hold it."""

    @classmethod
    def of(cls, holders: Ints, alike: Ints, size: Ints, num_ranks: Ints) -> Stages:
        """Return the stages of tensors.

        Args:
            holders: by tensor, the index of the set of ranks that hold its first box.
            alike: by tensor, a number that is equal for tensors that the same sets of ranks hold and need.
            num_ranks: by set of ranks that hold tensors, their number.
        """
        needs, number = np.unique(alike, return_inverse=True)
        found, stage = np.unique(holders * len(needs) + number.reshape(-1), return_inverse=True)
        stage, found = stage.reshape(-1), found // max(len(needs), 1)
        count = int(stage.max(initial=-1)) + 1
        order = np.argsort(stage, kind="stable")
        before = np.cumsum(size[order]) - size[order]
        total = np.zeros(count, np.int64)
        np.add.at(total, stage, size)
        offset = np.empty(len(size), np.int64)
        offset[order] = before - (np.cumsum(total) - total)[stage[order]]
        return cls(stage, offset, size, total, num_ranks[found])


class Slices:
    """The slices of all tensors for some number of rounds."""

    def __init__(self, stages: Stages, count: Ints, num_bytes: Ints, num_rounds: int, num_lanes: int = 1) -> None:
        """Args:
        count: by stage, its number of slices.
        num_bytes: by stage, the bytes of it that all receive.
        num_rounds: the rounds that they are spread over.
        num_lanes: the receivers of each lane get the slices of a stage that is in few rounds in rounds of their own.
        """
        self._stages, self._num_lanes = stages, num_lanes
        of_tensor = count[stages.stage]
        self._unit = np.maximum(stages.total, 1)[stages.stage] / of_tensor  # bytes of a slice, by tensor
        end = stages.offset + np.maximum(stages.size, 1)
        self._first = np.minimum((stages.offset / self._unit).astype(np.int64), of_tensor - 1)
        """By tensor, the slice of its stage that it begins in."""
        last = np.clip(np.ceil(end / self._unit).astype(np.int64) - 1, self._first, of_tensor - 1)
        self.parts = last - self._first + 1
        """By tensor, the number of slices that it lies in."""
        self.first_item = np.cumsum(self.parts) - self.parts
        self.tensor_of_item, self.turn = count_up(self._first, self.parts)
        """By item, a slice of a tensor: the tensor, and its turn among equally good sources."""
        first = np.cumsum(count) - count
        of_slice = _spread(count, num_bytes, num_rounds, num_lanes)
        self.round = of_slice[first[stages.stage[self.tensor_of_item]] + self.turn].reshape(-1)
        """By place, an item in a lane, the round in which it is sent."""

    @property
    def order(self) -> Ints:
        """Places in transfer order."""
        return np.lexsort((np.repeat(self.turn, self._num_lanes), self.round))

    def place(self, item: Ints, receivers: Ints) -> Ints:
        """Return the places of items [N] for the sets of receivers of these indices [N]."""
        places: Ints = item * self._num_lanes + receivers % self._num_lanes
        return places

    def cut(self, tensor: Ints, low: Ints, high: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut N held parts of needed boxes at the edges of the slices.

        Parts of fewer rows than slices, such as the experts of a needed box that are held one by one, lie in the slices
        that are at the same share of the needed box.

        Args:
            tensor: [N].
            low: [N, D], start of the parts.
            high: [N, D], their stop.
            first: [N], first row of the needed box.
            last: [N], its end.

        Returns:
            for each part of a part: its row among the N, start, stop and item.
        """
        repeats = self.parts[tensor]
        row, number = count_up(0, repeats)
        of = tensor[row]
        start, stop = low[row], high[row]
        several = np.flatnonzero(repeats[row] > 1)
        rows = (high[:, 0] - low[:, 0])[row[several]]
        edge, is_last = self._first[of[several]] + number[several], number[several] + 1 == repeats[row[several]]
        begin = self._share(of[several], edge)
        end = np.where(is_last, 1.0, self._share(of[several], edge + 1))
        base = start[several, 0]
        middle = ((low[:, 0] + high[:, 0]) / 2 - first) / np.maximum(last - first, 1)
        round_up = 1 - middle[row[several]]
        start[several, 0] = base + (begin * rows + round_up).astype(np.int64)
        stop[several, 0] = base + (end * rows + round_up).astype(np.int64)
        some = np.flatnonzero(start[:, 0] < stop[:, 0])
        return row[some], start[some], stop[some], self.first_item[of[some]] + number[some]

    def _share(self, tensor: Ints, edge: Ints) -> Ints:
        """Return the share of each tensor [N] that lies before an edge of its stage."""
        before = edge * self._unit[tensor] - self._stages.offset[tensor]
        share: Ints = np.clip(before / np.maximum(self._stages.size[tensor], 1), 0.0, 1.0)
        return share


def _spread(count: Ints, num_bytes: Ints, num_rounds: int, num_lanes: int) -> Ints:
    """Return the rounds [num slices, num_lanes] of the slices of all stages, with equally many bytes in each round.

    Stages of as many slices as there are rounds, or of several times as many, have equally many in each. The others
    begin one after another, and the lanes of each.
    """
    stage, turn = count_up(0, count)
    rounds = np.repeat((turn * num_rounds // np.maximum(count, 1)[stage])[:, None], num_lanes, axis=1)
    others = np.flatnonzero(count[stage] % num_rounds > 0)
    size = (num_bytes / np.maximum(count, 1))[stage[others]]
    for lane in range(num_lanes if len(others) else 0):
        phase = (stage[others] * 0.618034 + lane / num_lanes) % 1
        order = np.argsort((turn[others] + phase) / count[stage[others]], kind="stable")
        middle = np.cumsum(size[order]) - size[order] / 2
        share = middle / max(middle[-1] + size[order[-1]] / 2, 1)
        rounds[others[order], lane] = np.minimum((share * num_rounds).astype(np.int64), num_rounds - 1)
    return rounds


@dataclass(frozen=True, slots=True)
class Loads(ArrayTable):
    """N loads of groups of ranks, several of which may be of the same group and place: arrays [N]."""

    owner: Ints
    """Index of the group; each of its ranks has the load."""
    place: Ints
    """Place of the slice of a tensor, as `Slices.place` returns."""
    num_bytes: Ints
    """At least 1 each."""

    def in_rounds(self, rounds: Ints) -> tuple[Ints, Ints]:
        """Return the sums of one owner's loads in one round, and of each load [N] the index of its sum.

        Args:
            rounds: by place, its round.
        """
        key = self.owner * (int(rounds.max(initial=0)) + 1) + rounds[self.place]
        return np.bincount(key, self.num_bytes), key

    def largest(self, rounds: Ints) -> int:
        """Return the largest sum of one owner's loads in one round; `rounds` as of `in_rounds`."""
        return int(self.in_rounds(rounds)[0].max(initial=0))


def share_buffers(bucket_bytes: int, num_hops: int, received: int, packed: int) -> tuple[int, int]:
    """Return the most bytes that a rank receives in a round, and the most that it packs.

    A rank has one bucket more than there are hops, and two staging buffers. Together they have 2 `bucket_bytes`, which
    are shared in the ratio of what would have to fit; neither gets less than a sixteenth of the other.

    Args:
        received: the most bytes that a rank receives in a round, of some number of rounds.
        packed: the most bytes that a rank packs in a round, of as many.
    """
    received, packed = max(received, -(-packed // 16), 1), max(packed, -(-received // 16), 1)
    whole = 2 * bucket_bytes / ((num_hops + 1) * received + 2 * packed)
    bucket, staging = (int(whole * num_bytes) for num_bytes in (received, packed))
    return max(bucket - PADDING, bucket // 2, 1), max(staging - PADDING, staging // 2, 1)


def cut_rounds(rounds: Ints, order: Ints, limited: Sequence[tuple[Loads, int]]) -> Ints:
    """Cut rounds of consecutive slices into the fewest that are within limits; return the new round of each place.

    Args:
        rounds: by place, its round.
        order: places in transfer order, of ascending rounds.
        limited: loads, and the most bytes of an owner in one round; a slice whose own load is larger ends up in a round
            in which that owner has no other load.
    """
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    starts = np.searchsorted(rounds[order], rounds[order])
    for loads, limit in limited:
        sums, number = loads.in_rounds(rounds)
        some = np.flatnonzero(sums[number] > limit)
        key, group = np.unique(number[some] * len(order) + position[loads.place[some]], return_inverse=True)
        number, at = np.divmod(key, len(order))
        size = np.bincount(group, loads.num_bytes[some], len(key))
        end = np.cumsum(size)
        same = np.searchsorted(number, number)
        # the first load that may share a round with each load
        first = np.clip(np.searchsorted(end - size, end - limit), same, np.arange(len(end)))
        earliest = np.where(first > same, at[first - 1] + 1, 0)
        np.maximum.at(starts, at, earliest)
    starts = np.maximum.accumulate(starts)
    found, start, count = np.zeros(len(order), np.int64), 0, 0
    while start < len(order):
        stop = int(np.searchsorted(starts, start, side="right"))
        found[order[start:stop]] = count
        start, count = stop, count + 1
    return found


def are_contiguous(start: Ints, stop: Ints, extent: Ints) -> Ints:
    """Return, by box [N], whether its elements are contiguous in a row-major tensor: bool.

    Args:
        start: [N, D].
        stop: [N, D].
        extent: [N, D], the tensor's size.
    """
    contiguous, is_single = np.ones(len(start), bool), np.ones(len(start), bool)
    for length, size in zip((stop - start).T, extent.T, strict=True):
        contiguous &= is_single | (length == size)
        is_single &= length == 1
    return contiguous
