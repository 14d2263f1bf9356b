"""The part of a plan that a delta sync executes: only pieces of boxes that have changed since an earlier sync.

    box of the plan    rows 0:4096 of an embedding                    32 MiB
    its pieces         runs of rows, at most `PIECE_BYTES` each       a row that is larger is a piece
    marks              one bit per piece: it has changed since the base, the sync that the receivers hold

Plans stay static; a delta sync selects from one. Decisions:

- **Granularity.** A piece is at most `PIECE_BYTES`, so that a few changed rows of a large box do not send all of it.
  Changed pieces that follow each other in a box travel as one. Both ends cut a box alike, since its rows and their
  size are the same in every rank's tensors.
- **Who decides.** The rank that sends a box first compares its pieces with digests of the base, which it keeps
  (`megarl.reshard.transfer.delta_sync`). All copies of a piece come from that rank in every sync, because the plan does
  not change, so its digests describe what every receiver holds.
- **Who knows.** Before the rounds, marks travel along the messages of the plan: from a sender to its receivers in hop
  0, then from ranks that relay. So both ends of each message, and ranks that pass a box on, select the same pieces.
- **All-gathers** cannot be ragged: one runs in full if any member's share has changed, else it is left out.
- **Progress.** Every message of the selection joins the group of its round and hop in the plan, at both ends. All ranks
  start these groups in one order, with the marks' groups before them. Of all groups that have not ended, take the first
  in that order: the peers of its messages are at that group or wait to begin it, so that it ends. This holds for any
  selection, also under NCCL's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.reshard.layout.boxes import Ints
from megarl.reshard.layout.layout import Box
from megarl.reshard.planning.rounds import Gather, Hop, LocalCopy, MessagePart, Receive, Round, Send
from megarl.reshard.transfer.bucket import BoxSlot

PIECE_BYTES = 1 << 18
"""Largest piece in bytes, unless a single row is larger."""


@dataclass(frozen=True, slots=True)
class CutBox:
    """A box that is cut into pieces along its first dimension."""

    first: int
    """Index of the first piece's mark."""
    num_pieces: int
    rows: int
    rows_per_piece: int
    row_bytes: int

    @classmethod
    def cut(cls, first: int, box: Box, num_bytes: int) -> CutBox:
        """Cut a box of `num_bytes` bytes."""
        rows = box[0][1] - box[0][0] if box else 1
        row_bytes = num_bytes // rows
        rows_per_piece = min(rows, max(1, PIECE_BYTES // row_bytes))
        return cls(first, -(-rows // rows_per_piece), rows, rows_per_piece, row_bytes)

    @property
    def marks(self) -> slice:
        """Where the marks of the pieces are."""
        return slice(self.first, self.first + self.num_pieces)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The first row of each piece, and the first row after it."""
        step = self.rows_per_piece
        return [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]

    def runs(self, marked: Sequence[bool]) -> list[tuple[int, int]]:
        """Return the rows of marked pieces, first and after the last; pieces that follow each other are one run."""
        if self.num_pieces == 1:
            return [(0, self.rows)] if marked[self.first] else []
        runs: list[tuple[int, int]] = []
        for number, (start, stop) in enumerate(self.pieces):
            if marked[self.first + number]:
                if runs and runs[-1][1] == start:
                    start = runs.pop()[0]
                runs.append((start, stop))
        return runs


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of one of the rank's tensors, which it sends to others or copies for itself."""

    local: str
    box: Box
    cut: CutBox


@dataclass(frozen=True, slots=True)
class RoundBoxes:
    """The boxes of one round, in the order of `Round`."""

    copies: tuple[CutBox, ...]
    gathers: tuple[tuple[tuple[CutBox, ...], ...], ...]
    """By all-gather and member, the boxes of its share."""
    sends: tuple[tuple[tuple[CutBox, ...], ...], ...]
    """By hop and message."""
    receives: tuple[tuple[tuple[CutBox, ...], ...], ...]
    """By hop and message."""


@dataclass(frozen=True, slots=True)
class SelectedRound:
    """What a delta sync executes of a round."""

    round: Round
    slots: Ints
    """int64 [n, 4], one line per slot of `round`: its index among the slots of the full round, its first row in that
    slot's box, the first row after it, and its offset in the bucket."""


class DeltaPlan:
    """The pieces of the boxes in one rank's rounds, and which of them the rank tells others about."""

    def __init__(self, rounds: Sequence[Round], member: int = -1) -> None:
        """`member`: index of the rank in the plan's all-gather group; -1 without one."""
        self._rounds, self._member = rounds, member
        self.held: list[HeldBox] = []
        """Every distinct box that this rank holds and sends or copies; their marks come first."""
        self._held: dict[tuple[str, Box], CutBox] = {}
        self.num_marks = 0
        for this in rounds:
            self._add_held(this)
        self.num_held = self.num_marks
        """Number of pieces of the boxes in `held`."""
        self._gathered = [[self._gathered_boxes(gather) for gather in this.gathers] for this in rounds]
        num_hops = max((len(this.hops) for this in rounds), default=0)
        self.incoming: list[dict[int, slice]] = []
        """By hop and source, where the marks of the boxes that it sends are."""
        received = [self._add_received(hop) for hop in range(num_hops)]
        self._boxes = [
            self._round_boxes(number, [of_hop[number] for of_hop in received]) for number in range(len(rounds))
        ]
        self.outgoing = [self._outgoing(hop) for hop in range(num_hops)]
        """By hop and destination, the indices of the marks of the boxes sent there."""
        own = [of_gather[member] for of_round in self._gathered for of_gather in of_round]
        self._gather_marks = [
            (np.concatenate([_indices(boxes), np.zeros(0, np.int64)]), of_gather)
            for boxes, of_gather in zip(own, (each for of_round in self._gathered for each in of_round), strict=True)
        ]

    # -- which pieces there are

    def _add_held(self, this: Round) -> None:
        parts = [copy.part for copy in this.copies]
        parts += [copy.part for gather in this.gathers for copy in gather.own_copies]
        parts += [part for hop in this.hops for send in hop.sends for part in send.parts]
        for part in parts:
            if part.local is not None and (part.local, part.box) not in self._held:
                cut = self._cut(part.box, part.num_bytes)
                self._held[part.local, part.box] = cut
                self.held.append(HeldBox(part.local, part.box, cut))

    def _cut(self, box: Box, num_bytes: int) -> CutBox:
        cut = CutBox.cut(self.num_marks, box, num_bytes)
        self.num_marks += cut.num_pieces
        return cut

    def _gathered_boxes(self, gather: Gather) -> tuple[tuple[CutBox, ...], ...]:
        boxes = [tuple(self._cut(slot.local_box, slot.num_bytes) for slot in slots) for slots in gather.slots]
        boxes[self._member] = tuple(self._held_box(copy.part) for copy in gather.own_copies)
        return tuple(boxes)

    def _held_box(self, part: MessagePart) -> CutBox:
        assert part.local is not None
        return self._held[part.local, part.box]

    def _add_received(self, hop: int) -> list[tuple[tuple[CutBox, ...], ...]]:
        """Return, by round and message, the boxes received in a hop; those of one source have consecutive marks."""
        messages = [
            (number, message) for number, this in enumerate(self._rounds) for message in this.hops[hop].receives
        ]
        found: dict[int, tuple[CutBox, ...]] = {}
        incoming: dict[int, slice] = {}
        for source in sorted({message.source for _, message in messages}):
            first = self.num_marks
            for _, message in messages:
                if message.source == source:
                    cuts = [self._cut(slot.local_box, slot.num_bytes) for slot in message.slots]
                    found[id(message)] = tuple(cuts)
            incoming[source] = slice(first, self.num_marks)
        self.incoming.append(incoming)
        return [tuple(found[id(message)] for message in this.hops[hop].receives) for this in self._rounds]

    def _round_boxes(self, number: int, receives: Sequence[tuple[tuple[CutBox, ...], ...]]) -> RoundBoxes:
        this, gathered = self._rounds[number], self._gathered[number]
        of_offset: dict[int, CutBox] = {}
        for gather, boxes in zip(this.gathers, gathered, strict=True):
            for slots, of_member in zip(gather.slots, boxes, strict=True):
                of_offset |= {slot.offset: box for slot, box in zip(slots, of_member, strict=True)}
        for hop, of_hop in zip(this.hops, receives, strict=True):
            for message, of_message in zip(hop.receives, of_hop, strict=True):
                of_offset |= {slot.offset: box for slot, box in zip(message.slots, of_message, strict=True)}

        def sent(part: MessagePart) -> CutBox:
            return of_offset[part.offset] if part.local is None else self._held_box(part)

        return RoundBoxes(
            tuple(self._held_box(copy.part) for copy in this.copies),
            tuple(gathered),
            tuple(tuple(tuple(map(sent, send.parts)) for send in hop.sends) for hop in this.hops),
            tuple(receives),
        )

    def _outgoing(self, hop: int) -> dict[int, Ints]:
        boxes: dict[int, list[CutBox]] = {}
        for this, of_round in zip(self._rounds, self._boxes, strict=True):
            for send, of_send in zip(this.hops[hop].sends, of_round.sends[hop], strict=True):
                boxes.setdefault(send.to, []).extend(of_send)
        return {to: _indices(boxes[to]) for to in sorted(boxes)}

    # -- what is selected

    @property
    def num_gathers(self) -> int:
        """Number of all-gathers of all rounds."""
        return len(self._gather_marks)

    def own_gather_marks(self, marks: Ints) -> Ints:
        """Return bool [num_gathers]: whether this rank's share of each all-gather has changed."""
        return np.array([marks[indices].any() for indices, _ in self._gather_marks], bool)

    def mark_gathered(self, marks: Ints, gathers: Ints) -> None:
        """Mark what comes through all-gathers that some member's share has changed of; `gathers`: [num_gathers]."""
        for is_marked, (_, of_gather) in zip(gathers.tolist(), self._gather_marks, strict=True):
            for number, boxes in enumerate(of_gather):
                for box in boxes if number != self._member else ():
                    marks[box.marks] = is_marked

    def select(self, marks: Ints, gathers: Ints) -> list[SelectedRound]:
        """Return what a sync executes of each round.

        Args:
            marks: bool [num_marks].
            gathers: bool [num_gathers], whether each all-gather runs.
        """
        marked, runs = marks.tolist(), iter(gathers.tolist())
        return [
            _Selection(this, marked).select(boxes, [next(runs) for _ in this.gathers])
            for this, boxes in zip(self._rounds, self._boxes, strict=True)
        ]


class _Selection:
    """The selection from one round."""

    def __init__(self, this: Round, marked: Sequence[bool]) -> None:
        self._this, self._marked = this, marked
        self._slots: list[tuple[int, int, int, int]] = []
        self._num_slots = 0
        """Number of slots of the full round so far."""
        self._received: dict[int, list[MessagePart]] = {}
        """By offset of a slot in the full round's bucket, what is received of it."""
        self._regions: list[int] = []
        self._end = self._split = 0

    def select(self, boxes: RoundBoxes, runs: Sequence[bool]) -> SelectedRound:
        gathers = tuple(
            gather
            for gather, of_gather, is_run in zip(self._this.gathers, boxes.gathers, runs, strict=True)
            if self._gather(gather, of_gather, is_run=is_run)
        )
        copies: list[LocalCopy] = []
        for copy, box in zip(self._this.copies, boxes.copies, strict=True):
            copies += self._copy(copy, box)
        hops = []
        for hop, receives, sends in zip(self._this.hops, boxes.receives, boxes.sends, strict=True):
            received = [part for pair in zip(hop.receives, receives, strict=True) for part in self._receive(*pair)]
            sent = [part for pair in zip(hop.sends, sends, strict=True) for part in self._send(*pair)]
            staged = (send.staging_offset + send.num_bytes for send in sent if send.staging_offset is not None)
            hops.append(Hop(tuple(sent), tuple(received), max(staged, default=0)))
        slots = np.array(self._slots, np.int64).reshape(-1, 4)
        return SelectedRound(Round(tuple(copies), gathers, tuple(hops), self._end, tuple(self._regions)), slots)

    def _gather(self, gather: Gather, boxes: Sequence[Sequence[CutBox]], *, is_run: bool) -> bool:
        for slots, of_member in zip(gather.slots, boxes, strict=True):
            for slot, box in zip(slots, of_member, strict=True):
                if is_run:
                    self._take(slot.offset, 0, box.rows, box)
                    self._received[slot.offset] = [MessagePart(None, (), slot.num_bytes, slot.offset)]
                self._num_slots += 1
        return is_run

    def _copy(self, copy: LocalCopy, box: CutBox) -> Iterator[LocalCopy]:
        for start, stop in box.runs(self._marked):
            offset = copy.slot.offset + start * box.row_bytes
            part = MessagePart(copy.part.local, _rows(copy.part.box, start, stop), (stop - start) * box.row_bytes)
            self._take(offset, start, stop, box)
            yield LocalCopy(part, _slot(copy.slot, start, stop, offset))
        self._num_slots += 1

    def _receive(self, message: Receive, boxes: Sequence[CutBox]) -> Iterator[Receive]:
        """Yield the messages for what has changed: one, or one for each run of a message that has a single box."""
        offset, slots = message.offset, list[BoxSlot]()
        for slot, box in zip(message.slots, boxes, strict=True):
            for start, stop in box.runs(self._marked):
                size = (stop - start) * box.row_bytes
                self._received.setdefault(slot.offset, []).append(MessagePart(None, (), size, offset))
                self._take(offset, start, stop, box)
                slots.append(_slot(slot, start, stop, offset))
                offset += size
            self._num_slots += 1
        if len(boxes) == 1:
            for each in slots:
                yield self._region(Receive(message.source, each.offset, each.num_bytes, (each,)))
        elif slots:
            yield self._region(Receive(message.source, message.offset, offset - message.offset, tuple(slots)))

    def _send(self, send: Send, boxes: Sequence[CutBox]) -> Iterator[Send]:
        """Yield the messages that `_receive` of the destination expects."""
        parts: list[MessagePart] = []
        for part, box in zip(send.parts, boxes, strict=True):
            if part.local is None:
                parts += self._received.get(part.offset, ())
            else:
                parts += [
                    MessagePart(part.local, _rows(part.box, start, stop), (stop - start) * box.row_bytes)
                    for start, stop in box.runs(self._marked)
                ]
        if len(boxes) > 1:
            if parts:
                yield Send(send.to, tuple(parts), send.staging_offset)
            return
        offset = send.staging_offset
        for part in parts:
            yield Send(send.to, (part,), offset)
            offset = None if offset is None else offset + part.num_bytes

    def _take(self, offset: int, start: int, stop: int, box: CutBox) -> None:
        self._slots.append((self._num_slots, start, stop, offset))
        self._end = max(self._end, offset + (stop - start) * box.row_bytes)

    def _region(self, message: Receive) -> Receive:
        gap = message.offset - self._split
        self._regions += [gap, message.num_bytes] if gap else [message.num_bytes]
        self._split = message.offset + message.num_bytes
        return message


def _rows(box: Box, start: int, stop: int) -> Box:
    """Return rows of the box, counted from its first."""
    return ((box[0][0] + start, box[0][0] + stop), *box[1:]) if box else box


def _slot(slot: BoxSlot, start: int, stop: int, offset: int) -> BoxSlot:
    return BoxSlot(slot.local, _rows(slot.local_box, start, stop), slot.dtype, offset)


def _indices(boxes: Sequence[CutBox]) -> Ints:
    """Return the indices of the marks of all boxes, one after another."""
    if not boxes:
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(box.first, box.first + box.num_pieces) for box in boxes])
