"""Executable rounds of a rank's plan: tensor names, boxes, and the offset of each box in the bucket.

    bucket of rank 2     | all-gather: part of rank 2, part of rank 3 | own boxes | from rank 0 | relayed by rank 3 |

The boxes of one path that a rank receives from one rank in one hop of a round form one message, except large boxes:
each is a message of its own, which can be sent and received in place without packing. A message is packed once for all
its receivers, and relayed as it was received.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.layout import Box, hash_rows, local_extents
from megarl.reshard.layout.slices import are_contiguous
from megarl.reshard.planning.plan import Moves, RankPlan
from megarl.reshard.transfer.bucket import BoxSlot

ALIGNMENT = 16
"""Messages start at multiples of this many bytes of the bucket."""

LARGE_MESSAGE_BYTES = 1 << 18
"""A box of at least this size is sent as a message, or gathered, of its own."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A box of one of the trainer's tensors or, if `local` is None, bytes of the bucket."""

    local: str | None
    box: Box
    num_bytes: int
    offset: int = 0
    """Offset in the bucket, if `local` is None."""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A box that the rank holds itself and copies locally."""

    part: MessagePart
    slot: BoxSlot
    """Destination of the copy."""


@dataclass(frozen=True, slots=True)
class Send:
    """One message to another rank."""

    to: int
    parts: tuple[MessagePart, ...]
    staging_offset: int | None
    """Offset in the staging buffer that the parts are packed at, one for all messages with equal parts; None: they are
    sent from where they lie, several only if they were received in one message, one after another."""

    @property
    def num_bytes(self) -> int:
        """Size of the message in bytes."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Receive:
    """One message from another rank."""

    source: int
    offset: int
    """Offset of the message in the bucket."""
    num_bytes: int
    slots: tuple[BoxSlot, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """One all-gather of the rank's group, with equal shares."""

    offset: int
    """Offset in the bucket, where the members' shares lie one after another."""
    num_bytes: int
    """Bytes of all shares."""
    own_copies: tuple[LocalCopy, ...]
    slots: tuple[tuple[BoxSlot, ...], ...]
    """By group member, the slots of its share."""

    @property
    def share(self) -> int:
        """Bytes of one member's share."""
        return self.num_bytes // len(self.slots)


@dataclass(frozen=True, slots=True)
class Hop:
    """Messages exchanged together; both ends of a pair list their messages in the same order."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    staging_bytes: int
    """Size of the staging buffer that the sends are packed into."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of all sent messages."""
        return sum(send.num_bytes for send in self.sends)


@dataclass(frozen=True, slots=True)
class Round:
    """Copies, all-gathers and messages of one rank in one round."""

    copies: tuple[LocalCopy, ...]
    gathers: tuple[Gather, ...]
    hops: tuple[Hop, ...]
    bucket_bytes: int
    regions: tuple[int, ...]
    """Sizes of consecutive regions of the bucket, of which each received message is one."""

    @property
    def slots(self) -> tuple[BoxSlot, ...]:
        """Slots of everything that lies in the bucket."""
        return (
            *(slot for gather in self.gathers for of_member in gather.slots for slot in of_member),
            *(copy.slot for copy in self.copies),
            *(slot for hop in self.hops for receive in hop.receives for slot in receive.slots),
        )

    @property
    def bytes_delivered(self) -> int:
        """Bytes delivered to the engine's rank."""
        copied = sum(copy.part.num_bytes for copy in self.copies) + sum(gather.num_bytes for gather in self.gathers)
        return copied + sum(receive.num_bytes for hop in self.hops for receive in hop.receives)


def hops_of_step(rounds: Sequence[Round], step: int) -> list[tuple[int, int]]:
    """Return what a rank starts in a step, as (round, hop): hop 0 of round `step`, hop 1 of `step` - 1..."""
    num_hops = max((len(this.hops) for this in rounds[:1]), default=0)
    return [(step - hop, hop) for hop in range(num_hops) if 0 <= step - hop < len(rounds)]


def build_rounds(index: SyncIndex, plan: RankPlan) -> list[Round]:
    """Return all rounds of the plan, including empty ones: every rank has the same number."""
    with gc_disabled():
        return _RoundBuilder(index, plan).build()


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collector: it would scan 100,000 new objects, none of which is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _RoundBuilder:
    """Converts rows of the plan to names, boxes and bucket offsets."""

    def __init__(self, index: SyncIndex, plan: RankPlan) -> None:
        self._index, self._plan = index, plan
        receives, sends = plan.receives, plan.sends
        need = index.classes[index.class_of[plan.rank]].locals if plan.rank in index.class_of else ()
        self._locals = [need[local] for local in receives.local.tolist()]
        self._boxes = self._local_boxes(receives)
        self._dtypes = [index.specs[tensor].dtype for tensor in receives.tensor.tolist()]
        self._itemsize = index.itemsize[receives.tensor].tolist()
        self._size, self._peer, self._item = receives.num_bytes.tolist(), receives.peer.tolist(), receives.item.tolist()
        self._gathered = plan.gathered.tolist()
        own = np.flatnonzero(receives.peer == plan.rank)
        self._held = dict(zip(own.tolist(), self._parts(plan.held), strict=True))
        rows = np.flatnonzero(sends.local >= 0)
        held = sends.take(rows)
        self._sent = dict(zip(rows.tolist(), self._parts(held), strict=True))
        """By row of the sends, what the rank holds; the others it relays."""
        extent = local_extents(index.sources[plan.rank].pieces, index.width)[held.local]
        in_place = np.ones(len(sends), bool)
        in_place[rows] = are_contiguous(held.start + held.shift, held.stop + held.shift, extent)
        self._in_place: list[bool] = in_place.tolist()
        self._send_size = sends.num_bytes.tolist()
        self._received_path, self._sent_path = (
            list(zip(moves.hop.tolist(), moves.peer.tolist(), moves.path.tolist(), strict=True))
            for moves in (receives, sends)
        )
        self._received_box, self._sent_box = (  # equal for equal boxes of a tensor
            hash_rows([moves.tensor, *moves.start.T, *moves.stop.T]).tolist() for moves in (receives, sends)
        )

    def _parts(self, held: Moves) -> list[MessagePart]:
        """Return where the rank holds boxes."""
        names = self._index.sources[self._plan.rank].pieces.locals
        columns = held.local.tolist(), self._local_boxes(held), held.num_bytes.tolist()
        return [MessagePart(names[number], box, size) for number, box, size in zip(*columns, strict=True)]

    def _local_boxes(self, moves: Moves) -> list[Box]:
        num_dims = [len(self._index.specs[tensor].shape) for tensor in moves.tensor.tolist()]
        ends = zip((moves.start + moves.shift).tolist(), (moves.stop + moves.shift).tolist(), num_dims, strict=True)
        return [tuple(zip(start, stop, strict=True))[:dims] for start, stop, dims in ends]

    def build(self) -> list[Round]:
        edges = np.arange(self._plan.num_rounds + 1)
        received = np.searchsorted(self._plan.receives.round, edges).tolist()
        sent = np.searchsorted(self._plan.sends.round, edges).tolist()
        return [self._round(range(*received[k : k + 2]), range(*sent[k : k + 2])) for k in range(self._plan.num_rounds)]

    def _round(self, received: Sequence[int], sent: Sequence[int]) -> Round:
        self._end = self._split = 0
        self._regions: list[int] = []
        self._bucket_offsets: dict[int, int] = {}
        """Offsets in this round's bucket of what it receives, by the hash of the box in `_received_box`."""
        self._message_of: dict[int, int] = {}
        gathers = tuple(self._gathers([row for row in received if self._gathered[row]]))
        rest = [row for row in received if not self._gathered[row]]
        self._end = aligned(self._end)
        own = self._by_element_size([row for row in rest if row in self._held])
        copies = tuple([LocalCopy(self._held[row], self._slot(row)) for row in own])
        receives: list[list[Receive]] = [[] for _ in range(self._plan.num_hops)]
        others = [row for row in rest if row not in self._held]
        for hop, source, message in _messages(others, self._received_path, self._size, self._index.large_bytes):
            receives[hop].append(self._receive(source, message))
        sends, staging = self._sends(sent)
        hops = tuple(Hop(tuple(sends[hop]), tuple(receives[hop]), staging[hop]) for hop in range(self._plan.num_hops))
        return Round(copies, gathers, hops, self._end, tuple(self._regions))

    def _gathers(self, rows: Sequence[int]) -> Iterator[Gather]:
        """Yield one all-gather for all small items, and one per large item."""
        members = self._plan.group
        by_item: dict[int, list[int]] = {}
        for row in rows:
            by_item.setdefault(self._item[row], []).append(row)
        bundles: list[list[int]] = [[]]
        for of_item in by_item.values():
            is_large = all(self._size[row] >= self._index.large_bytes for row in of_item)
            if is_large and len(of_item) == len(members):  # one box per member
                bundles.append(of_item)
            else:
                bundles[0] += of_item
        for bundle in filter(None, bundles):
            mine = members.index(self._plan.rank)
            begin = self._end = aligned(self._end)
            of_members = [self._by_element_size([r for r in bundle if self._peer[r] == member]) for member in members]
            slots = tuple(tuple(self._slot(row) for row in of_member) for of_member in of_members)
            own = zip(of_members[mine], slots[mine], strict=True)
            copies = tuple(LocalCopy(self._held[row], slot) for row, slot in own)
            yield Gather(begin, self._end - begin, copies, slots)

    def _by_element_size(self, rows: list[int]) -> list[int]:
        """Return rows of several paths in the order that aligns every box to its elements."""
        return sorted(rows, key=lambda row: -self._itemsize[row])

    def _receive(self, source: int, rows: Sequence[int]) -> Receive:
        begin = self._end = aligned(self._end)
        slots = tuple([self._slot(row) for row in rows])
        self._message_of |= dict.fromkeys([slot.offset for slot in slots], begin)
        self._regions += [begin - self._split, self._end - begin] if begin > self._split else [self._end - begin]
        self._split = self._end
        return Receive(source, begin, self._end - begin, slots)

    def _slot(self, row: int) -> BoxSlot:
        """Allocate the next slot in the bucket."""
        offset = self._bucket_offsets[self._received_box[row]] = self._end
        self._end += self._size[row]
        return BoxSlot(self._locals[row], self._boxes[row], self._dtypes[row], offset)

    def _sends(self, sent: Sequence[int]) -> tuple[list[list[Send]], list[int]]:
        """Return the messages of each hop, and the bytes that they take in the staging buffer."""
        sends: list[list[Send]] = [[] for _ in range(self._plan.num_hops)]
        ends, packed = [0] * self._plan.num_hops, [dict[tuple[int, ...], int]() for _ in sends]
        for hop, to, message in _messages(sent, self._sent_path, self._send_size, self._index.large_bytes):
            parts = tuple([self._sent_part(row) for row in message])
            if self._lies_in_a_row(message, parts):
                sends[hop].append(Send(to, parts, None))
                continue
            key = tuple([self._sent_box[row] for row in message])
            if key not in packed[hop]:
                packed[hop][key] = begin = aligned(ends[hop])
                ends[hop] = begin + sum([part.num_bytes for part in parts])
            sends[hop].append(Send(to, parts, packed[hop][key]))
        return sends, ends

    def _sent_part(self, row: int) -> MessagePart:
        if row in self._sent:
            return self._sent[row]
        return MessagePart(None, (), self._send_size[row], self._bucket_offsets[self._sent_box[row]])

    def _lies_in_a_row(self, rows: Sequence[int], parts: Sequence[MessagePart]) -> bool:
        """Return whether the parts of a message can be sent from where they lie."""
        if len(rows) == 1:
            return self._in_place[rows[0]]
        if any(part.local is not None for part in parts) or len({self._message_of[part.offset] for part in parts}) > 1:
            return False
        return all(one.offset + one.num_bytes == other.offset for one, other in pairwise(parts))


def _messages(
    rows: Sequence[int], paths: Sequence[tuple[int, int, int]], size: Sequence[int], large_bytes: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (hop, peer, rows) of each message; `paths`: by row (hop, peer, path), by which `rows` are sorted."""
    for (hop, peer, _), group in groupby(rows, key=paths.__getitem__):
        of_path = list(group)
        small = [row for row in of_path if size[row] < large_bytes]
        if small:
            yield hop, peer, small
        for row in of_path:
            if size[row] >= large_bytes:
                yield hop, peer, [row]


def aligned(offset: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
