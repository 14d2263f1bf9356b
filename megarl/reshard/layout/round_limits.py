"""Cuts the tensor parts of a sync into rounds whose messages fit the buffers of every rank.

    loads     by group of ranks and tensor part: the bytes that a rank receives, packs to send, or packs to relay
    rounds    consecutive tensor parts, as many as fit: a load exceeds the limit only if it is that of a single part

A rank packs a box into a staging buffer before it sends it, unless the box is large and lies contiguously in the rank's
tensor. A large box is packed once for all its receivers. Small boxes are packed once per receiver, since the messages
to two receivers may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.reshard.layout.boxes import Ints
from megarl.reshard.layout.relay_tree import Ranks, RemoteSources

PADDING = 1024
"""Bytes of each buffer reserved for alignment."""


@dataclass(frozen=True, slots=True)
class Loads:
    """N loads of groups of ranks: arrays [N]."""

    owner: Ints
    """Index of the group; each of its ranks has the load."""
    item: Ints
    """Index of the tensor part in transfer order."""
    num_bytes: Ints
    row_bytes: Ints
    """Bytes per row of the needed boxes, rounded up: what a part has more than its share if rows do not divide."""

    @classmethod
    def of(cls, owner: Ints, item: Ints, num_bytes: Ints, rows: Ints) -> Loads:
        """Return the sums per owner and tensor part, without those of zero bytes.

        Args:
            rows: [N], rows of the box that each load is for.
        """
        some = np.flatnonzero(num_bytes)
        num_bytes, rows = num_bytes[some], rows[some]
        return cls(owner[some], item[some], num_bytes, -(-num_bytes // rows))._sums()

    @classmethod
    def join(cls, loads: Sequence[Loads]) -> Loads:
        """Return all loads, with the owners of each sequence numbered after those of the previous one."""
        first = np.cumsum([0, *(int(each.owner.max(initial=-1)) + 1 for each in loads)])
        owners = [each.owner + number for each, number in zip(loads, first, strict=False)]
        columns = ([getattr(each, name) for each in loads] for name in ("item", "num_bytes", "row_bytes"))
        return cls(np.concatenate(owners), *map(np.concatenate, columns))

    def num_parts(self, limit: int) -> Ints:
        """Return the number of parts [N] that each load has to be split into to fit `limit` bytes."""
        parts = -(-self.num_bytes // np.maximum(limit - self.row_bytes, 1))
        enough: Ints = np.where(self.num_bytes > limit, parts, 1)
        return enough

    def _sums(self) -> Loads:
        """Return the sums per owner and tensor part, sorted by both."""
        if not len(self.owner):
            return self
        key = self.owner * (self.item.max() + 1) + self.item
        order = np.argsort(key, kind="stable")  # much faster than sorting by two keys, and than an unstable sort
        key, owner, item = key[order], self.owner[order], self.item[order]
        first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        sums = (np.add.reduceat(values[order], first) for values in (self.num_bytes, self.row_bytes))
        return Loads(owner[first], item[first], *sums)


def round_bytes(bucket_bytes: int, num_hops: int = 1) -> int:
    """Return the most bytes that a rank receives in a round, and the most that it packs in one hop.

    One bucket per hop, at least two, and two staging buffers take two buckets of `bucket_bytes` together.
    """
    buffers = max(num_hops, 2) + 2
    return max(2 * bucket_bytes // buffers - PADDING, bucket_bytes // buffers)


def cut_rounds(loads: Loads, num_items: int, limit: int) -> Ints:
    """Return the round of each tensor part [num_items]: the fewest rounds of consecutive parts within the limit.

    Args:
        loads: sorted by owner and part, one load of each.
        limit: the most bytes of an owner in one round; a part whose own load is larger ends up in a round in which that
            owner has no other load.
    """
    end = np.cumsum(loads.num_bytes)
    begin = end - loads.num_bytes
    owner_start = np.searchsorted(loads.owner, loads.owner)
    # the first load that may share a round with each load
    first = np.clip(np.searchsorted(begin, end - limit), owner_start, np.arange(len(end)))
    earliest = np.where(first > owner_start, loads.item[first - 1] + 1, 0)
    starts = np.zeros(num_items, np.int64)
    np.maximum.at(starts, loads.item, earliest)
    starts = np.maximum.accumulate(starts)
    rounds, start, number = np.zeros(num_items, np.int64), 0, 0
    while start < num_items:
        stop = int(np.searchsorted(starts, start, side="right"))
        rounds[start:stop] = number
        start, number = stop, number + 1
    return rounds


def are_contiguous(start: Ints, stop: Ints, extent: Ints) -> Ints:
    """Return, by box [N], whether its elements are contiguous in a row-major tensor: bool.

    Args:
        start: [N, D].
        stop: [N, D].
        extent: [N, D], the tensor's size.
    """
    length = stop - start
    leading = np.ones((len(length), length.shape[1] + 1), bool)
    leading[:, 1:] = np.logical_and.accumulate(length == 1, axis=1)
    contiguous: Ints = ((length == extent) | leading[:, :-1]).all(axis=1)
    return contiguous


class FanOut:
    """Upper bounds of the number of ranks that one rank sends the same box to."""

    def __init__(self, nodes: Sequence[int], groups: Sequence[Ranks], *, relay: bool, remote: RemoteSources) -> None:
        """See `SourceSelector` for the arguments."""
        self._nodes, self._relay, self._remote = nodes, relay, remote
        self._in_group = max(map(len, groups), default=1) - 1
        self._counts: dict[Ranks, Mapping[int, int]] = {}

    def of_holder(self, holders: Ranks, receivers: Ranks) -> int:
        """Return the most receivers that one of `holders` sends to."""
        if receivers == holders or set(receivers).issubset(holders):
            return 0
        held, needed = self._count(holders), self._count(receivers)
        on_node = max((-(-needed.get(node, 0) // count) for node, count in held.items()), default=0)
        remote = [count for node, count in needed.items() if node not in held]
        if not remote:
            sends = 0
        elif self._relay:
            sends = 1 + (self._children(holders, receivers) if not set(receivers).isdisjoint(holders) else 0)
        else:
            sends = -(-sum(remote) // max(len(holders), 1))
        return min(on_node + sends + self._in_group, len(receivers))

    def of_fetcher(self, holders: Ranks, receivers: Ranks) -> int:
        """Return the most ranks that a rank relays a box to which it does not hold."""
        held = self._count(holders)
        remote = [count for node, count in self._count(receivers).items() if node not in held]
        if not self._relay or not remote:
            return 0
        return max(remote) - 1 + self._children(holders, receivers)

    def _children(self, holders: Ranks, receivers: Ranks) -> int:
        """Return the most machines that one machine passes a box on to."""
        return (self._remote.tree(holders, receivers, len(self._count(receivers))).arc - 1).bit_length()

    def _count(self, ranks: Ranks) -> Mapping[int, int]:
        """Return the number of the ranks by node."""
        if ranks not in self._counts:
            self._counts[ranks] = Counter(self._nodes[rank] for rank in ranks)
        return self._counts[ranks]
