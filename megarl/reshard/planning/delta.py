"""The part of a plan that a delta sync executes: codes of the elements that have changed since an earlier sync.

    box of the plan    rows 0:4096 of an embedding                          32 MiB
    its count          elements that differ from the base, the sync that the receivers hold
    its code           places and values of these elements (megarl.reshard.transfer.element_code)

Plans stay static; a delta sync replaces the boxes of one by their codes. Decisions:

- **Who decides.** The rank that sends a box first compares it with the base, of which it keeps a copy
  (`megarl.reshard.transfer.delta_sync`). All copies of a box come from that rank in every sync, because the plan does
  not change, so its copy is what every receiver holds.
- **Who knows.** Form and size of a code follow from the count. Before the rounds, counts travel along the messages of
  the plan: from a sender to its receivers in hop 0, then from ranks that relay. So both ends of each message, and ranks
  that pass a box on, know its size, and nothing else is negotiated.
- **Memory.** A code is never larger than its box, so that the codes of a round fit where its boxes do. Large boxes are
  sent from where they lie, but their codes are packed, for which each step has a limit: the largest boxes above it are
  sent as they are (`limit_packed`).
- **All-gathers** have equal shares, as large as the largest member's codes; one without any change is left out.
- **Progress.** Every message with codes joins the group of its round and hop in the plan, at both ends. All ranks
  start these groups in one order, with the counts' groups before them. Of all groups that have not ended, take the
  first in that order: the peers of its messages are at that group or wait to begin it, so that it ends. This holds for
  any counts, also under NCCL's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.reshard.layout.layout import Box, Ints, volume
from megarl.reshard.planning.rounds import (
    Gather,
    Hop,
    LocalCopy,
    MessagePart,
    Receive,
    Round,
    Send,
    aligned,
    hops_of_step,
)
from megarl.reshard.transfer.bucket import BoxSlot
from megarl.reshard.transfer.element_code import CodeForm, code_form


@dataclass(frozen=True, slots=True)
class CodedBox:
    """A box of the plan whose changed elements are counted."""

    index: int
    """Place of its count among those that the rank knows."""
    elements: int
    num_bytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.num_bytes // self.elements


@dataclass(frozen=True, slots=True)
class HeldBox(CodedBox):
    """A box of one of the rank's tensors, which it sends to others or copies for itself."""

    local: str
    box: Box


@dataclass(frozen=True, slots=True)
class CodedRound:
    """A round with codes in place of its boxes."""

    round: Round
    """Parts named by `code_name` are codes; others are boxes that are sent as they are."""
    lines: Ints
    """int64 [n, 3], one line per code in the bucket: the slot's index in the plan's round, its number of changed
    elements, and the code's offset in the bucket."""


def code_name(index: int) -> str:
    """Return the name of a held box's code among the tensors of a coded round; no tensor of a model has a space."""
    return f"code {index}"


class DeltaPlan:
    """The boxes of one rank's rounds whose changes are counted, and which counts the rank tells others."""

    def __init__(self, rounds: Sequence[Round], member: int = -1) -> None:
        """`member`: index of the rank in the plan's all-gather group; -1 without one."""
        self._rounds, self.member = rounds, member
        self._coded: list[CodedBox] = []
        """Every box whose changes are counted: held, gathered and received ones."""
        self._held: dict[tuple[str | None, Box], HeldBox] = {}
        self.in_bucket: list[dict[int, CodedBox]] = [{} for _ in rounds]
        """By round and offset in its bucket, the box that lies there."""
        for this in rounds:
            self._add_held(this)
        self.held = tuple(self._held.values())
        """Every distinct box that this rank holds and sends or copies; their counts come first."""
        for number, this in enumerate(rounds):
            own = [copy for gather in this.gathers for copy in gather.own_copies]
            for copy in (*this.copies, *own):
                self.in_bucket[number][copy.slot.offset] = self._held[copy.part.local, copy.part.box]
            for gather in this.gathers:
                for place, slots in enumerate(gather.slots):
                    if place != member:
                        self._add_slots(number, slots)
        num_hops = max((len(this.hops) for this in rounds), default=0)
        self._sent_in_place = [self._find_sent_in_place(step) for step in range(len(rounds) + num_hops - 1)]
        """By step, the boxes of this rank that are sent from where they lie."""
        self.incoming = [self._add_incoming(hop) for hop in range(num_hops)]
        """By hop and source, where the counts of the boxes that it sends are."""
        self.outgoing = [self._outgoing(hop) for hop in range(num_hops)]
        """By hop and destination, the indices of the counts of the boxes sent there."""
        gathers = [
            (boxes, gather) for boxes, this in zip(self.in_bucket, rounds, strict=True) for gather in this.gathers
        ]
        self.gathered = [
            np.array([boxes[slot.offset].index for boxes, gather in gathers for slot in gather.slots[place]], np.int64)
            for place in range(len(gathers[0][1].slots) if gathers else 0)
        ]
        """By member of the all-gather group, the indices of the counts of its shares; empty without all-gathers."""

    @property
    def num_boxes(self) -> int:
        """Number of boxes whose changes are counted."""
        return len(self._coded)

    def limit_packed(self, counts: Ints, max_bytes: int) -> None:
        """Count all elements of some boxes as changed, so that each step packs at most `max_bytes` of codes.

        Only codes of boxes that the plan sends from where they lie; those of others are packed in their place.

        Args:
            counts: int64, of the boxes in `held`, which come first.
        """
        for boxes in self._sent_in_place:
            forms = {box: code_form(box.elements, box.itemsize, int(counts[box.index])) for box in boxes}
            packed = sum(aligned(form.num_bytes) for form in forms.values() if form.kind != "whole")
            for box in sorted(forms, key=lambda box: -forms[box].num_bytes):
                if packed <= max_bytes:
                    break
                if forms[box].kind != "whole":
                    packed -= aligned(forms[box].num_bytes)
                    counts[box.index] = box.elements

    def _find_sent_in_place(self, step: int) -> set[CodedBox]:
        hops = [self._rounds[number].hops[hop] for number, hop in hops_of_step(self._rounds, step)]
        sends = [send for hop in hops for send in hop.sends if send.staging_offset is None]
        parts = [part for send in sends for part in send.parts if part.local is not None]
        return {self._held[part.local, part.box] for part in parts}

    def _add_held(self, this: Round) -> None:
        parts = [copy.part for copy in this.copies]
        parts += [copy.part for gather in this.gathers for copy in gather.own_copies]
        parts += [part for hop in this.hops for send in hop.sends for part in send.parts]
        for part in parts:
            if part.local is not None and (part.local, part.box) not in self._held:
                held = HeldBox(len(self._coded), volume(part.box), part.num_bytes, part.local, part.box)
                self._held[part.local, part.box] = held
                self._coded.append(held)

    def _add_slots(self, number: int, slots: Sequence[BoxSlot]) -> None:
        for slot in slots:
            box = CodedBox(len(self._coded), volume(slot.local_box), slot.num_bytes)
            self.in_bucket[number][slot.offset] = box
            self._coded.append(box)

    def _add_incoming(self, hop: int) -> dict[int, slice]:
        """Count the boxes received in a hop; return, by source, where their counts are, which are consecutive."""
        messages = [(number, each) for number, this in enumerate(self._rounds) for each in this.hops[hop].receives]
        incoming: dict[int, slice] = {}
        for source in sorted({message.source for _, message in messages}):
            first = self.num_boxes
            for number, message in messages:
                if message.source == source:
                    self._add_slots(number, message.slots)
            incoming[source] = slice(first, self.num_boxes)
        return incoming

    def _outgoing(self, hop: int) -> dict[int, Ints]:
        indices: dict[int, list[int]] = {}
        for number, this in enumerate(self._rounds):
            for send in this.hops[hop].sends:
                indices.setdefault(send.to, []).extend(self.box_of(number, part).index for part in send.parts)
        return {to: np.array(indices[to], np.int64) for to in sorted(indices)}

    def select(self, counts: Ints) -> list[CodedRound]:
        """Return what a sync executes of each round; `counts`: int64 [num_boxes], those of this rank and received."""
        changed = counts.tolist()
        forms = [code_form(box.elements, box.itemsize, n) for box, n in zip(self._coded, changed, strict=True)]
        return [
            _CodedRoundBuilder(self, number, changed, forms).build(this) for number, this in enumerate(self._rounds)
        ]

    def box_of(self, number: int, part: MessagePart) -> CodedBox:
        """Return the box that is a part of a message of this round, sent or copied by this rank."""
        return self.in_bucket[number][part.offset] if part.local is None else self._held[part.local, part.box]


class _CodedRoundBuilder:
    """Replaces the boxes of one round by codes, one after another in bucket and staging buffer."""

    def __init__(self, plan: DeltaPlan, number: int, counts: Sequence[int], forms: Sequence[CodeForm]) -> None:
        self._plan, self._number, self._counts, self._forms = plan, number, counts, forms
        self._in_bucket = plan.in_bucket[number]
        self._lines: list[tuple[int, int, int]] = []
        self._num_slots = 0
        """Number of slots of the plan's round so far."""
        self._received: dict[int, MessagePart] = {}
        """By offset of a slot in the plan's bucket, its code in the bucket."""
        self._regions: list[int] = []
        self._end = self._split = 0

    def build(self, this: Round) -> CodedRound:
        gathers = [each for gather in this.gathers for each in self._gather(gather)]
        self._end = aligned(self._end)
        copies = [each for copy in this.copies for each in self._copy(copy)]
        receives = [tuple(each for message in hop.receives for each in self._receive(message)) for hop in this.hops]
        sends = [self._sends(hop) for hop in this.hops]
        hops = [Hop(sent, received, staging) for (sent, staging), received in zip(sends, receives, strict=True)]
        coded = Round(tuple(copies), tuple(gathers), tuple(hops), self._end, tuple(self._regions))
        return CodedRound(coded, np.array(self._lines, np.int64).reshape(-1, 3))

    def _form(self, slot: BoxSlot) -> CodeForm:
        return self._forms[self._in_bucket[slot.offset].index]

    def _gather(self, gather: Gather) -> Iterator[Gather]:
        sizes = [sum(self._form(slot).num_bytes for slot in of_member) for of_member in gather.slots]
        if not any(sizes):
            self._num_slots += sum(map(len, gather.slots))
            return
        share = min(aligned(max(sizes)), gather.share)
        begin = aligned(self._end)
        slots: list[tuple[BoxSlot, ...]] = []
        for number, of_member in enumerate(gather.slots):
            self._end = begin + number * share
            slots.append(tuple(self._take_all(of_member)))
        self._end = begin + len(sizes) * share
        parts = [
            self._held_part(copy.part, alone=len(gather.own_copies) == 1)
            for copy in gather.own_copies
            if self._form(copy.slot).num_bytes
        ]
        copies = tuple(map(LocalCopy, parts, slots[self._plan.member]))
        yield Gather(begin, len(sizes) * share, copies, tuple(slots))

    def _copy(self, copy: LocalCopy) -> Iterator[LocalCopy]:
        # a code before it takes at most half of its box, so that this gap is free
        if self._form(copy.slot).kind == "whole":
            itemsize = self._in_bucket[copy.slot.offset].itemsize
            self._end = -(-self._end // itemsize) * itemsize
        for slot in self._take_all((copy.slot,)):
            yield LocalCopy(self._held_part(copy.part, alone=True), slot)

    def _receive(self, message: Receive) -> Iterator[Receive]:
        before, begin = self._end, aligned(self._end)
        self._end = begin
        slots = tuple(self._take_all(message.slots))
        if not slots:
            self._end = before
            return
        self._regions += [begin - self._split, self._end - begin] if begin > self._split else [self._end - begin]
        self._split = self._end
        yield Receive(message.source, begin, self._end - begin, slots)

    def _take_all(self, slots: Sequence[BoxSlot]) -> Iterator[BoxSlot]:
        """Yield the slots that have codes, at their places in the bucket."""
        for slot in slots:
            if size := self._form(slot).num_bytes:
                changed = self._counts[self._in_bucket[slot.offset].index]
                self._lines.append((self._num_slots, changed, self._end))
                self._received[slot.offset] = MessagePart(None, (), size, self._end)
                yield replace(slot, offset=self._end)
                self._end += size
            self._num_slots += 1

    def _sends(self, hop: Hop) -> tuple[tuple[Send, ...], int]:
        """Return the messages that `_receive` of the destinations expects, and their bytes in the staging buffer."""
        sends: list[Send] = []
        packed: dict[tuple[int, ...], int] = {}
        end = 0
        for send in hop.sends:
            boxes = [self._plan.box_of(self._number, part).index for part in send.parts]
            parts = tuple(
                self._received[part.offset]
                if part.local is None
                else self._held_part(part, alone=send.staging_offset is None)
                for part, box in zip(send.parts, boxes, strict=True)
                if self._forms[box].num_bytes
            )
            if not parts:
                continue
            if send.staging_offset is None and all(part.local is None for part in parts):
                sends.append(Send(send.to, parts, None))
            elif send.staging_offset is None and parts == send.parts:
                sends.append(send)
            else:
                key = tuple(boxes)
                if key not in packed:
                    packed[key] = begin = aligned(end)
                    end = begin + sum(part.num_bytes for part in parts)
                sends.append(Send(send.to, parts, packed[key]))
        return tuple(sends), end

    def _held_part(self, part: MessagePart, *, alone: bool) -> MessagePart:
        """Return the code of a box that this rank holds; the box, if it is sent as it is and not next to codes."""
        index = self._plan.box_of(self._number, part).index
        form = self._forms[index]
        if form.kind == "whole" and alone:
            return part
        return MessagePart(code_name(index), ((0, form.num_bytes),), form.num_bytes)
