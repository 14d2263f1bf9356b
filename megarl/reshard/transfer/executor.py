"""Executes the rounds of one rank as a pipeline: packing, transfer and delivery of consecutive rounds overlap.

    round k        pack | hop 0 ..... | hop 1 ..... | engine reads bucket 0 |
    round k + 1           pack        | hop 0 ..... | hop 1 ..... | engine reads bucket 1
    round k + 2                         pack        | hop 0 ..... | hop 1 ..... | engine reads bucket 2
    round k + 3                                       pack: waits until bucket 0 is free

Boxes arrive in the bucket in plan order, and the engine copies them straight into its parameters: full tensors are
never assembled. If the engine's parameters are in this process, large boxes that are contiguous there are received in
place, and relayed from there. Large boxes that are contiguous in the trainer's tensors are sent in place.

A rank has two staging buffers to send from, and buckets to receive into, one more than there are hops. In step s, every
rank starts hop 0 of round s, hop 1 of round s - 1 and so on as one group: while bytes of one round cross the network,
those of the round before are relayed. Both ends of a message are in the same step, so that the groups complete in this
order even where a group occupies the connections of a rank until all its messages have arrived, as with NCCL.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Ints, slices
from megarl.reshard.planning.rounds import Gather, Hop, LocalCopy, MessagePart, Round, aligned, hops_of_step
from megarl.reshard.transfer.bucket import (
    BoxBucket,
    BoxSlot,
    Bucket,
    Buffer,
    DiscardSink,
    Parameters,
    PrivateBuffer,
    ShardSink,
    SyncMemory,
    consecutive,
    contiguous_bytes,
    copy_boxes,
    make_buffer,
    map_bucket,
    no_wait,
    split_regions,
    stack_boxes,
    view_box,
    view_to_send,
    views_like,
)
from megarl.reshard.transfer.element_code import decode_boxes
from megarl.reshard.transfer.transport import Deadline, InFlight, Transport, closed_on_failure, wait_for


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Sizes of the buffers that a rank's rounds need in addition to its parameters, in bytes."""

    bucket: int
    """Size of each of the buckets to receive into."""
    num_buckets: int
    staging: int
    """Size of each of the two staging buffers to send from."""

    @classmethod
    def for_rounds(cls, rounds: Sequence[Round]) -> BufferSizes:
        """Return buffers that fit the largest round."""
        num_hops = max((len(this.hops) for this in rounds[:1]), default=1)
        staging = [
            sum(aligned(rounds[number].hops[hop].staging_bytes) for number, hop in hops_of_step(rounds, step))
            for step in range(len(rounds) + num_hops - 1)
        ]
        return cls(max((this.bucket_bytes for this in rounds), default=0), num_hops + 1, max(staging, default=0))

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return 2 * self.staging + (self.num_buckets * max(self.bucket, mmap.PAGESIZE) if self.bucket else 0)


class CodeReader:
    """A `ShardSink` that decodes into tensors of this process."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._lines: Sequence[Ints] = ()

    def expect_codes(self, rounds: Sequence[Ints]) -> None:
        """Expect these codes in the rounds of the next sync, as `CodeSink.expect_codes`."""
        self._lines = rounds

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Decode what round `index` brings; the returned function does not wait."""
        if bucket is not None:
            boxes = [self._tensors[slot.local][slices(slot.local_box)] for slot in bucket.slots]
            decode_boxes(map_bucket(bucket), self._lines[index], boxes)
        return no_wait


@dataclass
class _RoundInFlight:
    """A round that has been started and not finished."""

    index: int
    round: Round
    buffer: Buffer
    """The bucket, without bytes if this rank receives nothing."""
    receiving: list[InFlight] = field(default_factory=list)
    sending: list[InFlight] = field(default_factory=list)
    """Sends of the round; some read the bucket, which must not be overwritten before they complete."""
    unpack: list[tuple[BoxSlot, int]] = field(default_factory=list)
    """Slots of the bucket to copy to parameters in this process, with their bytes."""
    regions: dict[int, Tensor] = field(default_factory=dict)
    """By offset in the bucket, the bytes of received messages, which may lie in a parameter of this process instead."""


class BoxExecutor:
    """Executes the rounds of one rank."""

    def __init__(
        self,
        rank: int,
        rounds: Sequence[Round],
        buffer_sizes: BufferSizes,
        gather_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        device: torch.device | None = None,
        memory: SyncMemory | None = None,
    ) -> None:
        """Prepare to execute `rounds`.

        Args:
            rank: this rank, in the plan and in the transport.
            gather_group: process group of the plan's all-gathers; None if it has none.
            transport: counts what the sync does, too; None: a new one over torch's default group.
            device: of the buffers; None: that of the tensors.
            memory: what the buffers are taken from; None: allocate and free them in each run.
        """
        self._device, self._memory = device, memory
        self._rank, self._rounds, self._buffer_sizes, self._gather_group = rank, rounds, buffer_sizes, gather_group
        self.transport = transport or Transport()
        self._staging: deque[tuple[Tensor, Sequence[InFlight], int]] = deque()
        """The staging buffers, the next one first, each with the last messages sent from it and their round."""

    def run(
        self, tensors: Mapping[str, Tensor], sink: ShardSink | Parameters | None, deadline: Deadline | None = None
    ) -> None:
        """Execute all rounds; collective over all ranks of the plan.

        The WeightSyncError for a rank that is lost or late names this rank, the round and the ranks waited for. The
        transport and the gather group are unusable afterwards; unless the transport uses torch's default group, the
        other ranks fail at once too.

        Args:
            tensors: the tensors that this rank holds, under the names of its layout.
            sink: destination of the boxes that this rank needs; None if it needs none.
            deadline: deadline of all waits for other ranks; None: the transport's timeout from now on.
        """
        self._deadline = deadline or Deadline(self.transport.timeout_seconds)
        self._held = tensors
        self._targets = sink.tensors if isinstance(sink, Parameters) else None
        loader = None if isinstance(sink, Parameters) else sink or DiscardSink()
        device = self._device or device_of(tensors, sink)
        sizes, memory = self._buffer_sizes, self._memory or SyncMemory()
        self.transport.stats.peak_extra_bytes = sizes.total
        is_private = isinstance(sink, Parameters | CodeReader) or not sizes.bucket
        make = PrivateBuffer if is_private else make_buffer
        with memory.lent():
            buckets = memory.take("buckets", make, sizes.num_buckets, sizes.bucket, device)
            staging = memory.take("staging", PrivateBuffer, 2, sizes.staging, device)
            self._staging.extend((buffer.bytes, (), 0) for buffer in staging)
            try:
                with closed_on_failure(self.transport, self._gather_group):
                    self._execute(buckets, loader)
            finally:
                self._staging.clear()
                self._held, self._targets = {}, None
        if self._memory is None:
            memory.close()

    def _execute(self, buckets: Sequence[Buffer], loader: ShardSink | None) -> None:
        """Execute all rounds; `buckets`: to receive into, in turn."""
        num_buckets, num_hops = len(buckets), len(buckets) - 1
        pending: list[Callable[[], None]] = [no_wait] * num_buckets
        flights: dict[int, _RoundInFlight] = {}
        for step in range(len(self._rounds) + num_hops):
            if step < len(self._rounds):
                which = step % num_buckets
                pending[which]()  # the engine has read the bucket
                if (last := flights.pop(step - num_buckets, None)) is not None:
                    self._wait(last.sending, last.index)
                flights[step] = _RoundInFlight(step, self._rounds[step], buckets[which])
                self._start(flights[step])
            self._exchange([(flights[number], hop) for number, hop in hops_of_step(self._rounds, step)])
            if (number := step - num_hops) >= 0:
                pending[number % num_buckets] = self._finish(flights[number], loader)
        for wait in pending:
            wait()
        for last in flights.values():
            self._wait(last.sending, last.index)

    def _start(self, flight: _RoundInFlight) -> None:
        this = flight.round
        if self._targets is None:
            flight.regions = split_regions(flight.buffer.bytes, this.regions)
        if this.gathers:
            assert self._gather_group is not None
            gathers = [self._prepare_gather(flight, gather) for gather in this.gathers]
            with self._in_round(flight.index):
                flight.receiving += self.transport.start_all_gathers(gathers, self._gather_group)
        self._copy(this.copies, flight)

    def _finish(self, flight: _RoundInFlight, loader: ShardSink | None) -> Callable[[], None]:
        """Deliver what has arrived; return a function that waits until the bucket may be overwritten."""
        this = flight.round
        self._wait(flight.receiving, flight.index)
        self.transport.stats.buckets += bool(this.bucket_bytes)
        self.transport.stats.bytes_delivered += 0 if isinstance(loader, DiscardSink) else this.bytes_delivered
        if loader is None:
            self._unpack(flight)
            return no_wait
        if not this.bucket_bytes:
            return loader.load_boxes(flight.index, None)
        if flight.buffer.bytes.is_cuda:
            torch.cuda.current_stream(flight.buffer.bytes.device).synchronize()  # the engine reads on another stream
        return loader.load_boxes(flight.index, Bucket(flight.buffer.path, flight.buffer.num_bytes, this.slots))

    def _copy(self, copies: Sequence[LocalCopy], flight: _RoundInFlight) -> None:
        """Copy boxes that this rank holds to where they are needed."""
        if self._targets is not None:
            targets = [self._targets[copy.slot.local][slices(copy.slot.local_box)] for copy in copies]
            copy_boxes(targets, [self._held_box(copy.part) for copy in copies])
            return
        boxes = [self._view(copy.part) for copy in copies]
        for same in consecutive([copy.slot.offset for copy in copies], [copy.part.num_bytes for copy in copies]):
            copy_boxes(views_like(flight.buffer.bytes, copies[same][0].slot.offset, boxes[same]), boxes[same])

    def _unpack(self, flight: _RoundInFlight) -> None:
        """Copy from the bucket to parameters in this process."""
        assert self._targets is not None
        targets = [view_box(self._targets[slot.local], slot.local_box, size) for slot, size in flight.unpack]
        sources: list[Tensor] = []
        for same in consecutive([slot.offset for slot, _ in flight.unpack], [size for _, size in flight.unpack]):
            sources += views_like(flight.buffer.bytes, flight.unpack[same.start][0].offset, targets[same])
        copy_boxes(targets, sources)

    def _prepare_gather(self, flight: _RoundInFlight, gather: Gather) -> tuple[Tensor, Tensor]:
        """Return the output of an all-gather, and this rank's share."""
        assert self._gather_group is not None
        member, share = self._gather_group.rank(), gather.share
        output = self._gather_target(gather, flight.round)
        in_place = output is not None
        if output is None:
            output = flight.buffer.bytes[gather.offset : gather.offset + gather.num_bytes]
            others = [slots for number, slots in enumerate(gather.slots) if number != member]
            flight.unpack += [(slot, slot.num_bytes) for slots in others for slot in slots]
        own_share = output[member * share : (member + 1) * share]
        parts = [copy.part for copy in gather.own_copies]
        held = contiguous_bytes(self._view(parts[0])) if [part.num_bytes for part in parts] == [share] else None
        if held is None:
            boxes = [self._view(part) for part in parts]
            copy_boxes(views_like(own_share, 0, boxes), boxes)
        if self._targets is not None and not in_place:
            self._copy(gather.own_copies, flight)
        return output, own_share if held is None else held.view(-1)

    def _gather_target(self, gather: Gather, this: Round) -> Tensor | None:
        """Return the bytes of the parameter if all shares lie there in a row and none is relayed, else None."""
        if self._targets is None or any(len(slots) != 1 for slots in gather.slots):
            return None
        slots = [of_member[0] for of_member in gather.slots]
        relayed = {part.offset for hop in this.hops[1:] for send in hop.sends for part in send.parts}
        if any(slot.offset in relayed for slot in slots):
            return None
        union = stack_boxes([slot.local_box for slot in slots])
        if union is None or len({slot.local for slot in slots}) > 1:
            return None
        found = contiguous_bytes(self._targets[slots[0].local][slices(union)])
        return None if found is None else found.view(-1)

    def _exchange(self, started: Sequence[tuple[_RoundInFlight, int]]) -> None:
        """Start the messages of one step as one group: those of a hop, by its index, of each round."""
        if not started:
            return
        hops = [flight.round.hops[hop] for flight, hop in started]
        receives: list[tuple[Tensor, int]] = []
        for (flight, _), hop in zip(started, hops, strict=True):
            if self._targets is None:
                receives += [(flight.regions[message.offset], message.source) for message in hop.receives]
            else:
                receives += self._receive_targets(flight, hop)
        space = None
        if any(hop.staging_bytes for hop in hops):
            space, last_sent, last_index = self._staging.popleft()
            self._wait(last_sent, last_index)
        sends: list[tuple[Tensor, int]] = []
        begin = 0
        for (flight, number), hop in zip(started, hops, strict=True):
            if number and hop.sends:
                self._wait(flight.receiving, flight.index)  # it relays what it has received
            sends += self._pack(hop, flight, None if space is None else space[begin:])
            begin = aligned(begin + hop.staging_bytes)
        index = started[0][0].index
        with self._in_round(index):
            received, sent = self.transport.start(sends, receives)
        if space is not None:
            self._staging.append((space, sent, index))
        for flight, _ in started:  # the messages of a group may end together only
            flight.receiving += received
            flight.sending += sent

    def _wait(self, messages: Sequence[InFlight], index: int) -> None:
        with self._in_round(index):
            wait_for(messages, self._deadline)

    @contextmanager
    def _in_round(self, index: int) -> Iterator[None]:
        """Raise errors of the block with this rank and the round in front."""
        try:
            yield
        except WeightSyncError as e:
            raise type(e)(f"rank {self._rank}: round {index} of the weights: {e}") from e

    def _receive_targets(self, flight: _RoundInFlight, hop: Hop) -> list[tuple[Tensor, int]]:
        """Return (memory, source) per message: the memory of the parameter if it is contiguous, or of the bucket."""
        targets, regions, bucket = self._targets, flight.regions, flight.buffer.bytes
        assert targets is not None
        messages = []
        for message in hop.receives:  # 50,000 in a sync of a large model: as few calls as possible
            slots, offset, num_bytes = message.slots, message.offset, message.num_bytes
            if len(slots) == 1:
                slot = slots[0]
                box = view_to_send(targets[slot.local], slot.local_box, num_bytes)
                if box is not None:
                    regions[offset] = box
                    messages.append((box, message.source))
                    continue
                flight.unpack.append((slot, num_bytes))
            else:
                flight.unpack += [(slot, slot.num_bytes) for slot in slots]
            messages.append((bucket[offset : offset + num_bytes], message.source))
        return messages

    def _pack(self, hop: Hop, flight: _RoundInFlight, space: Tensor | None) -> list[tuple[Tensor, int]]:
        """Return (data, destination) per message; messages with equal parts are packed once, into `space`."""
        packed: dict[int, Tensor] = {}
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        messages = []
        for send in hop.sends:
            offset = send.staging_offset
            if offset is None:
                messages.append((self._in_place_bytes(send.parts[0], send.num_bytes, flight), send.to))
                continue
            if offset not in packed:
                assert space is not None
                boxes = [
                    self._received(p.offset, p.num_bytes, flight) if p.local is None else self._view(p)
                    for p in send.parts
                ]
                targets += views_like(space, offset, boxes)
                sources += boxes
                packed[offset] = space[offset : offset + send.num_bytes]
            messages.append((packed[offset], send.to))
        copy_boxes(targets, sources)
        return messages

    def _in_place_bytes(self, part: MessagePart, num_bytes: int, flight: _RoundInFlight) -> Tensor:
        """Return a view of the bytes to send from the part on, a copy of them if the tensor is a transposed view."""
        if part.local is None:
            return self._received(part.offset, num_bytes, flight)
        held, box = self._held[part.local], part.box
        if not held.is_contiguous():
            held = view_box(held, box, part.num_bytes).contiguous()
            box = tuple((0, n) for n in held.shape)
        found = view_to_send(held, box, part.num_bytes)
        if found is None:
            raise WeightSyncError(f"{part.local}: the tensor is larger than in its layout")
        return found

    def _received(self, offset: int, num_bytes: int, flight: _RoundInFlight) -> Tensor:
        """Return bytes that were received in this round."""
        region = flight.regions.get(offset)
        if region is not None and region.nbytes == num_bytes:
            return region
        return flight.buffer.bytes[offset : offset + num_bytes]

    def _view(self, part: MessagePart) -> Tensor:
        """Return a view of a box that this rank holds, of any shape if it is contiguous."""
        assert part.local is not None
        return view_box(self._held[part.local], part.box, part.num_bytes)

    def _held_box(self, part: MessagePart) -> Tensor:
        assert part.local is not None
        return self._held[part.local][slices(part.box)]


def device_of(tensors: Mapping[str, Tensor], sink: ShardSink | Parameters | None) -> torch.device:
    """Return the device of a rank's tensors or, if it holds none, of those that it writes; the CPU without any."""
    targets = sink.tensors if isinstance(sink, Parameters) else {}
    return next((tensor.device for tensor in chain(tensors.values(), targets.values())), torch.device("cpu"))
