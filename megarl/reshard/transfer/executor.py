"""Executes the rounds of one rank as a pipeline: packing, transfer and delivery of consecutive rounds overlap.

    round k        pack | transfer .. | hop 2 | engine reads bucket 0 ..... |
    round k + 1           pack | transfer ... | hop 2 | engine reads bucket 1
    round k + 2                                 pack: waits until bucket 0 is free

Boxes arrive in the bucket in plan order, and the engine copies them straight into its parameters: full tensors are
never assembled. If the engine's parameters are in this process, large boxes that are contiguous there are received in
place. Large boxes that are contiguous in the trainer's tensors are sent in place.

A rank has two buckets to receive into and two smaller staging buffers to send from. Sends of a round that do not fit in
one staging buffer are split into several batches.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, extent, slices
from megarl.reshard.planning.rounds import Gather, Hop, MessagePart, Receive, Round, Send
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot, DeviceBuffer, SharedBuffer, make_buffer, torch_dtype
from megarl.reshard.transfer.byte_counter import ByteCounter
from megarl.reshard.transfer.sink import Parameters, ShardSink
from megarl.reshard.transfer.transport import Deadline, InFlight, Transport, wait_for


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Sizes of the buffers that a rank's rounds need in addition to its parameters, in bytes."""

    bucket: int
    """Size of each of the two buckets to receive into."""
    staging: int
    """Size of each of the two staging buffers to send from."""

    @classmethod
    def for_rounds(cls, rounds: Sequence[Round], limit: int) -> BufferSizes:
        """Return buckets that fit the largest round, and staging that fits in the rest of `limit` or one message."""
        bucket = max((r.bucket_bytes for r in rounds), default=0)
        hops = [hop for r in rounds for hop in r.hops]
        largest = max((send.num_bytes for hop in hops for send in hop.sends), default=0)
        most = max((hop.bytes_sent for hop in hops), default=0)
        return cls(bucket, max(largest, min(most, limit - bucket)))

    def total(self, *, receives: bool) -> int:
        """Return the bytes of all buffers together."""
        return 2 * self.staging + (2 * max(self.bucket, mmap.PAGESIZE) if receives else 0)


@dataclass
class _RoundInFlight:
    """A round that has been started and not finished."""

    index: int
    round: Round
    buffer: SharedBuffer | DeviceBuffer | None
    """Shared memory of the bucket, if an engine in another process reads it."""
    bucket: Tensor | None
    """The bucket, uint8; None if this rank receives nothing."""
    receiving: list[InFlight] = field(default_factory=list)
    relaying: list[InFlight] = field(default_factory=list)
    """Sends that relay boxes from the bucket, which must not be overwritten before they complete."""
    unpack: list[BoxSlot] = field(default_factory=list)
    """Slots of the bucket to copy to parameters in this process."""

    @cached_property
    def relayed_offsets(self) -> set[int]:
        """Bucket offsets of the boxes that are relayed."""
        return {part.offset for hop in self.round.hops[1:] for send in hop.sends for part in send.parts}


class BoxExecutor:
    """Executes the rounds of one rank, with the buffers they need."""

    def __init__(
        self,
        rank: int,
        rounds: Sequence[Round],
        buffer_sizes: BufferSizes,
        gather_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Prepare to execute `rounds`.

        Args:
            rank: this rank, in the plan and in the transport.
            gather_group: process group of the plan's all-gathers; None if it has none.
            transport: None: use torch's default group.
        """
        self._rank, self._rounds, self._buffer_sizes, self._gather_group = rank, rounds, buffer_sizes, gather_group
        self.counter = ByteCounter(transport or Transport())

    def run(self, tensors: Mapping[str, Tensor], sink: ShardSink | Parameters | None) -> None:
        """Execute all rounds; collective over all ranks of the plan.

        Args:
            tensors: the tensors that this rank holds, under the names of its layout.
            sink: destination of the boxes that this rank needs; None if it needs none.

        Raises:
            WeightSyncError: another rank is lost or late; names this rank, the round and the ranks waited for. The
                transport and the gather group are unusable afterwards; unless the transport uses torch's default
                group, the other ranks fail at once too.
        """
        self._deadline = Deadline(self.counter.transport.timeout_seconds)
        self._held = tensors
        self._targets = sink.tensors if isinstance(sink, Parameters) else None
        loader = None if isinstance(sink, Parameters) else sink
        every = chain(tensors.values(), (self._targets or {}).values())
        device = next((tensor.device for tensor in every), torch.device("cpu"))
        num_bytes = self._buffer_sizes.total(receives=sink is not None)
        self.counter.allocate(num_bytes)
        size = max(self._buffer_sizes.bucket, mmap.PAGESIZE)
        buffers = [make_buffer(size, device) for _ in range(2)] if loader is not None else []
        spaces: list[Tensor | None] = [buffer.bytes for buffer in buffers] or [None, None]
        if self._targets is not None:
            spaces = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._staging = _StagingBuffers(self._buffer_sizes.staging, device, self._wait)
        pending: list[Callable[[], None]] = [_noop, _noop]
        in_flight: list[_RoundInFlight | None] = [None, None]
        previous: _RoundInFlight | None = None
        try:
            for index, this in enumerate(self._rounds):
                which = index % 2
                pending[which]()  # the engine has read the bucket
                if (last := in_flight[which]) is not None:
                    self._wait(last.relaying, last.index)
                in_flight[which] = flight = _RoundInFlight(
                    index, this, buffers[which] if buffers else None, spaces[which]
                )
                self._start(flight)
                if previous is not None:
                    pending[1 - which] = self._finish(previous, loader)
                previous = flight
            if previous is not None:
                pending[previous.index % 2] = self._finish(previous, loader)
            for wait in pending:
                wait()
            self._staging.wait()
        except BaseException:
            self.counter.transport.close()
            if self._gather_group is not None:
                self._gather_group.abort()
            raise
        finally:
            spaces.clear()
            self._staging.free()
            self._held, self._targets = {}, None
            for buffer in buffers:
                buffer.close()
            self.counter.free(num_bytes)

    def _start(self, flight: _RoundInFlight) -> None:
        this = flight.round
        if this.gathers:
            assert self._gather_group is not None
            gathers = [self._prepare_gather(flight, gather) for gather in this.gathers]
            with self._error_context(flight.index):
                flight.receiving += self.counter.start_all_gathers(gathers, self._gather_group)
        for copy in this.copies:
            self._target(copy.slot, flight).copy_(_box(self._held, copy.part), non_blocking=True)
        flight.receiving += self._exchange(flight, this.hops[0])

    def _finish(self, flight: _RoundInFlight, loader: ShardSink | None) -> Callable[[], None]:
        this = flight.round
        self._wait(flight.receiving, flight.index)
        for hop in this.hops[1:]:
            self._wait(self._exchange(flight, hop), flight.index)
        if flight.bucket is None:
            return _noop
        self.counter.buckets += bool(this.bucket_bytes)
        self.counter.bytes_delivered += this.bytes_delivered
        if loader is None:
            for slot in flight.unpack:
                self._target(slot, flight).copy_(_slot(flight, slot), non_blocking=True)
            return _noop
        if not this.bucket_bytes:
            return loader.load_boxes(flight.index, None)
        assert flight.buffer is not None
        if flight.bucket.is_cuda:
            torch.cuda.current_stream(flight.bucket.device).synchronize()  # the engine reads on another stream
        return loader.load_boxes(flight.index, BoxBucket(flight.buffer.path, flight.buffer.num_bytes, this.slots))

    def _target(self, slot: BoxSlot, flight: _RoundInFlight) -> Tensor:
        """Return the destination of the slot: the parameter if it is in this process, else the bucket."""
        if self._targets is not None:
            return self._targets[slot.local][slices(slot.local_box)]
        return _slot(flight, slot)

    def _prepare_gather(self, flight: _RoundInFlight, gather: Gather) -> tuple[Tensor, Tensor]:
        """Return the output of an all-gather, and this rank's share."""
        assert flight.bucket is not None
        assert self._gather_group is not None
        member, share = self._gather_group.rank(), gather.share
        output = self._gather_target(gather)
        in_place = output is not None
        if output is None:
            output = _region(flight.bucket, gather.offset, gather.num_bytes)
            others = [slots for number, slots in enumerate(gather.slots) if number != member]
            flight.unpack += [slot for slots in others for slot in slots]
        own_share = output.narrow(0, member * share, share)
        if (
            len(gather.own_copies) == 1
            and (held := _contiguous_bytes(_box(self._held, gather.own_copies[0].part))) is not None
        ):
            source_bytes = held
        else:
            _pack([copy.part for copy in gather.own_copies], own_share, self._read(flight))
            source_bytes = own_share
        if self._targets is not None and not in_place:
            for copy in gather.own_copies:
                self._target(copy.slot, flight).copy_(_box(self._held, copy.part))
        return output, source_bytes

    def _gather_target(self, gather: Gather) -> Tensor | None:
        """Return the bytes of the parameter if all shares lie there one after another, else None."""
        if self._targets is None or any(len(slots) != 1 for slots in gather.slots):
            return None
        slots = [of_member[0] for of_member in gather.slots]
        union = _stack_boxes([slot.local_box for slot in slots])
        if union is None or len({slot.local for slot in slots}) > 1:
            return None
        return _contiguous_bytes(self._targets[slots[0].local][slices(union)])

    def _exchange(self, flight: _RoundInFlight, hop: Hop) -> list[InFlight]:
        """Start the messages of the hop; return the receives to wait for.

        All receives start together with the first sends, so that no other rank's send waits for a send of this rank.
        """
        receives = [(self._receive_target(flight, message), message.source) for message in hop.receives]
        received: list[InFlight] = []
        read = self._read(flight)
        for batch in _split_by_limit(hop.sends, self._buffer_sizes.staging) if hop.sends else [()]:
            sends = self._pack(batch, read) if batch else []
            with self._error_context(flight.index):
                started, sent = self.counter.exchange(sends, receives)
            if batch:
                self._staging.record_sends(sent, flight.index)
            if hop is not flight.round.hops[0]:
                flight.relaying += sent
            if receives:
                received, receives = started, []
        return received

    def _wait(self, messages: Sequence[InFlight], index: int) -> None:
        with self._error_context(index):
            wait_for(messages, self._deadline)

    @contextmanager
    def _error_context(self, index: int) -> Iterator[None]:
        """Prefix errors with this rank and the round."""
        try:
            yield
        except WeightSyncError as e:
            raise type(e)(f"rank {self._rank}: round {index} of the weights: {e}") from e

    def _receive_target(self, flight: _RoundInFlight, message: Receive) -> Tensor:
        """Return the memory that the message is received into."""
        assert flight.bucket is not None
        if self._targets is not None:
            if len(message.slots) == 1 and message.offset not in flight.relayed_offsets:
                arrives = _contiguous_bytes(self._target(message.slots[0], flight))
                if arrives is not None:
                    return arrives
            flight.unpack += message.slots
        return _region(flight.bucket, message.offset, message.num_bytes)

    def _pack(self, batch: Sequence[Send], read: Callable[[MessagePart], Tensor]) -> list[tuple[Tensor, int]]:
        """Return (data, destination) per message: a view of a single contiguous box, else boxes packed into staging."""
        space, at = self._staging.acquire(), 0
        packed = []
        for send in batch:
            data = _contiguous_bytes(read(send.parts[0])) if len(send.parts) == 1 else None
            if data is None:
                data = _region(space, at, send.num_bytes)
                _pack(send.parts, data, read)
                at += send.num_bytes
            packed.append((data, send.to))
        return packed

    def _read(self, flight: _RoundInFlight) -> Callable[[MessagePart], Tensor]:
        def read(part: MessagePart) -> Tensor:
            if part.local is not None:
                return _box(self._held, part)
            assert flight.bucket is not None
            return _region(flight.bucket, part.offset, part.num_bytes)

        return read


class _StagingBuffers:
    """Two buffers to send from, used alternately."""

    def __init__(self, num_bytes: int, device: torch.device, wait: Callable[[Sequence[InFlight], int], None]) -> None:
        """Allocate the buffers; `wait(messages, round)` waits for messages."""
        self._spaces = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._in_flight: list[tuple[Sequence[InFlight], int]] = [((), 0), ((), 0)]
        self._current, self._wait = 0, wait

    def acquire(self) -> Tensor:
        """Return the next buffer once its previous sends have completed."""
        self._current = 1 - self._current
        self._wait(*self._in_flight[self._current])
        return self._spaces[self._current]

    def record_sends(self, messages: Sequence[InFlight], index: int) -> None:
        """Record the sends, in round `index`, that read the current buffer."""
        self._in_flight[self._current] = messages, index

    def wait(self) -> None:
        """Wait until all sends have completed."""
        for messages, index in self._in_flight:
            self._wait(messages, index)

    def free(self) -> None:
        """Drop the references to both buffers."""
        self._spaces, self._in_flight = [], []


def _split_by_limit(sends: Sequence[Send], limit: int) -> Iterator[Sequence[Send]]:
    """Yield batches of messages that together fit in a staging buffer of `limit` bytes."""
    batch: list[Send] = []
    size = 0
    for send in sends:
        if batch and size + send.num_bytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(send)
        size += send.num_bytes
    if batch:
        yield batch


def _pack(parts: Sequence[MessagePart], space: Tensor, read: Callable[[MessagePart], Tensor]) -> None:
    """Copy the parts one after another into `space`."""
    at = 0
    for part in parts:
        box = read(part)
        _region(space, at, part.num_bytes).view(box.dtype).view(box.shape).copy_(box, non_blocking=True)
        at += part.num_bytes


def _stack_boxes(boxes: Sequence[Box]) -> Box | None:
    """Return the union of boxes that are adjacent along the first dimension, or None if they are not."""
    for box, following in pairwise(boxes):
        if box[1:] != following[1:] or box[0][1] != following[0][0]:
            return None
    return ((boxes[0][0][0], boxes[-1][0][1]), *boxes[0][1:])


def _contiguous_bytes(box: Tensor) -> Tensor | None:
    """Return a uint8 view of the box, or None if it is not contiguous."""
    return box.view(-1).view(torch.uint8) if box.is_contiguous() else None


def _box(tensors: Mapping[str, Tensor], part: MessagePart) -> Tensor:
    assert part.local is not None
    return tensors[part.local][slices(part.box)]


def _slot(flight: _RoundInFlight, slot: BoxSlot) -> Tensor:
    assert flight.bucket is not None
    region = _region(flight.bucket, slot.offset, slot.num_bytes)
    return region.view(torch_dtype(slot.dtype)).view(extent(slot.local_box))


def _region(data: Tensor, offset: int, num_bytes: int) -> Tensor:
    return data.narrow(0, offset, num_bytes)


def _noop() -> None: ...
