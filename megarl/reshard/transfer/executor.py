"""Runs one rank's rounds: pack, wire, hand over, each of one round while the next is under way.

    round k        pack | wire ...... | hop 2 | engine reads bucket 0 ..... |
    round k + 1           pack | wire ....... | hop 2 | engine reads bucket 1
    round k + 2                                 pack: waits until bucket 0 is free

Boxes arrive in the bucket in the order of the plan, and the engine writes them straight into its parameters: nothing is
unpacked in between, and no whole tensor is ever put together. Where the engine's parameters lie in this process, large
boxes that are contiguous there arrive in them. A large box that is contiguous where it is held is sent from there.

Beside two buckets to receive into there are two smaller ones to send from; what a rank sends in a round and does not
fit one goes in several.
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
from megarl.reshard.planning.rounds import Gather, Hop, Part, Receive, Round, Send
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot, DeviceBuffer, SharedBuffer, make_buffer, torch_dtype
from megarl.reshard.transfer.byte_counter import Ledger
from megarl.reshard.transfer.sink import BoxSink, Parameters
from megarl.reshard.transfer.transport import Deadline, InFlight, Wire, wait_for


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a rank's rounds need beside its parameters."""

    bucket: int
    """Of each of two, to receive into."""
    staging: int
    """Of each of two, to send from."""

    @classmethod
    def of(cls, rounds: Sequence[Round], limit: int) -> Memory:
        """Buckets as large as the largest round; staging takes at most what `limit` leaves, or one message."""
        bucket = max((r.bucket_bytes for r in rounds), default=0)
        hops = [hop for r in rounds for hop in r.hops]
        largest = max((send.num_bytes for hop in hops for send in hop.sends), default=0)
        most = max((hop.bytes_sent for hop in hops), default=0)
        return cls(bucket, max(largest, min(most, limit - bucket)))

    def total(self, *, receives: bool) -> int:
        """Of all of them."""
        return 2 * self.staging + (2 * max(self.bucket, mmap.PAGESIZE) if receives else 0)


@dataclass
class _Flight:
    """A round that is under way."""

    index: int
    round: Round
    buffer: SharedBuffer | DeviceBuffer | None
    """The bucket's memory, where an engine in another process reads it."""
    into: Tensor | None
    """The bucket; None: nothing is received."""
    waiting: list[InFlight] = field(default_factory=list)
    leaving: list[InFlight] = field(default_factory=list)
    """What is handed on from the bucket, which must not be overwritten before."""
    unpack: list[BoxSlot] = field(default_factory=list)
    """What is in the bucket and goes to this process's parameters."""

    @cached_property
    def handed_on(self) -> set[int]:
        """Offsets of what is sent on from the bucket."""
        return {part.offset for hop in self.round.hops[1:] for send in hop.sends for part in send.parts}


class BoxExecutor:
    """One rank's rounds, and the buckets that they pass through."""

    def __init__(
        self,
        rank: int,
        rounds: Sequence[Round],
        memory: Memory,
        gather_group: dist.ProcessGroup | None = None,
        wire: Wire | None = None,
    ) -> None:
        """Args:
        rank: in the plan, and on the wire.
        gather_group: of the all-gathers, where the plan has some.
        wire: None: torch's default group.
        """
        self._rank, self._rounds, self._memory, self._gather_group = rank, rounds, memory, gather_group
        self.ledger = Ledger(wire or Wire())

    def run(self, tensors: Mapping[str, Tensor], sink: BoxSink | Parameters | None) -> None:
        """Move everything; collective over all ranks of the plan.

        Raises:
            WeightSyncError: another rank is gone or late: names this rank, the round and the ranks waited for. The
                wire and the gather group cannot be used again; unless it is torch's default group, the other ranks
                notice that at once.
        """
        self._deadline = Deadline(self.ledger.wire.timeout_seconds)
        self._held = tensors
        self._targets = sink.tensors if isinstance(sink, Parameters) else None
        loader = None if isinstance(sink, Parameters) else sink
        every = chain(tensors.values(), (self._targets or {}).values())
        device = next((tensor.device for tensor in every), torch.device("cpu"))
        num_bytes = self._memory.total(receives=sink is not None)
        self.ledger.allocate(num_bytes)
        size = max(self._memory.bucket, mmap.PAGESIZE)
        buffers = [make_buffer(size, device) for _ in range(2)] if loader is not None else []
        spaces: list[Tensor | None] = [buffer.bytes for buffer in buffers] or [None, None]
        if self._targets is not None:
            spaces = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._staging = _Staging(self._memory.staging, device, self._wait)
        pending: list[Callable[[], None]] = [_nothing, _nothing]
        flights: list[_Flight | None] = [None, None]
        before: _Flight | None = None
        try:
            for index, this in enumerate(self._rounds):
                which = index % 2
                pending[which]()  # the engine has read the bucket
                if (last := flights[which]) is not None:
                    self._wait(last.leaving, last.index)
                flights[which] = flight = _Flight(index, this, buffers[which] if buffers else None, spaces[which])
                self._start(flight)
                if before is not None:
                    pending[1 - which] = self._finish(before, loader)
                before = flight
            if before is not None:
                pending[before.index % 2] = self._finish(before, loader)
            for wait in pending:
                wait()
            self._staging.wait()
        except BaseException:
            self.ledger.wire.close()
            if self._gather_group is not None:
                self._gather_group.abort()
            raise
        finally:
            spaces.clear()
            self._staging.drop()
            self._held, self._targets = {}, None
            for buffer in buffers:
                buffer.close()
            self.ledger.free(num_bytes)

    def _start(self, flight: _Flight) -> None:
        this = flight.round
        if this.gathers:
            assert self._gather_group is not None
            gathers = [self._prepare_gather(flight, gather) for gather in this.gathers]
            with self._naming(flight.index):
                flight.waiting += self.ledger.start_all_gathers(gathers, self._gather_group)
        for copy in this.copies:
            self._target(copy.slot, flight).copy_(_box(self._held, copy.part), non_blocking=True)
        flight.waiting += self._exchange(flight, this.hops[0])

    def _finish(self, flight: _Flight, loader: BoxSink | None) -> Callable[[], None]:
        this = flight.round
        self._wait(flight.waiting, flight.index)
        for hop in this.hops[1:]:
            self._wait(self._exchange(flight, hop), flight.index)
        if flight.into is None:
            return _nothing
        self.ledger.buckets += bool(this.bucket_bytes)
        self.ledger.bytes_delivered += this.bytes_delivered
        if loader is None:
            for slot in flight.unpack:
                self._target(slot, flight).copy_(_slot(flight, slot), non_blocking=True)
            return _nothing
        if not this.bucket_bytes:
            return loader.load_boxes(flight.index, None)
        assert flight.buffer is not None
        if flight.into.is_cuda:
            torch.cuda.current_stream(flight.into.device).synchronize()  # the engine reads on a stream of its own
        return loader.load_boxes(flight.index, BoxBucket(flight.buffer.path, flight.buffer.num_bytes, this.slots))

    def _target(self, slot: BoxSlot, flight: _Flight) -> Tensor:
        """Where the slot's elements go: to the parameter if it is in this process, else to the bucket."""
        if self._targets is not None:
            return self._targets[slot.local][slices(slot.local_box)]
        return _slot(flight, slot)

    def _prepare_gather(self, flight: _Flight, gather: Gather) -> tuple[Tensor, Tensor]:
        """Where all parts of an all-gather go, and this rank's part."""
        assert flight.into is not None
        assert self._gather_group is not None
        member, share = self._gather_group.rank(), gather.share
        whole = self._gather_target(gather)
        direct = whole is not None
        if whole is None:
            whole = _region(flight.into, gather.offset, gather.num_bytes)
            others = [slots for number, slots in enumerate(gather.slots) if number != member]
            flight.unpack += [slot for slots in others for slot in slots]
        mine = whole.narrow(0, member * share, share)
        if len(gather.mine) == 1 and (held := _flat(_box(self._held, gather.mine[0].part))) is not None:
            given = held
        else:
            _pack([copy.part for copy in gather.mine], mine, self._read(flight))
            given = mine
        if self._targets is not None and not direct:
            for copy in gather.mine:
                self._target(copy.slot, flight).copy_(_box(self._held, copy.part))
        return whole, given

    def _gather_target(self, gather: Gather) -> Tensor | None:
        """The parameter's own bytes, where the members' parts lie there one after another."""
        if self._targets is None or any(len(slots) != 1 for slots in gather.slots):
            return None
        slots = [of_member[0] for of_member in gather.slots]
        union = _stacked([slot.local_box for slot in slots])
        if union is None or len({slot.local for slot in slots}) > 1:
            return None
        return _flat(self._targets[slots[0].local][slices(union)])

    def _exchange(self, flight: _Flight, hop: Hop) -> list[InFlight]:
        """Start the hop; what to wait for until everything has been received.

        All receives start with the first sends: nobody's sends can then wait for this rank's.
        """
        receives = [(self._landing(flight, message), message.source) for message in hop.receives]
        received: list[InFlight] = []
        read = self._read(flight)
        for load in _loads(hop.sends, self._memory.staging) if hop.sends else [()]:
            sends = self._pack(load, read) if load else []
            with self._naming(flight.index):
                now, sent = self.ledger.exchange(sends, receives)
            if load:
                self._staging.sent(sent, flight.index)
            if hop is not flight.round.hops[0]:
                flight.leaving += sent
            if receives:
                received, receives = now, []
        return received

    def _wait(self, messages: Sequence[InFlight], index: int) -> None:
        with self._naming(index):
            wait_for(messages, self._deadline)

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Errors say where they were met."""
        try:
            yield
        except WeightSyncError as e:
            raise type(e)(f"rank {self._rank}: round {index} of the weights: {e}") from e

    def _landing(self, flight: _Flight, message: Receive) -> Tensor:
        """What the message is received into."""
        assert flight.into is not None
        if self._targets is not None:
            if len(message.slots) == 1 and message.offset not in flight.handed_on:
                arrives = _flat(self._target(message.slots[0], flight))
                if arrives is not None:
                    return arrives
            flight.unpack += message.slots
        return _region(flight.into, message.offset, message.num_bytes)

    def _pack(self, load: Sequence[Send], read: Callable[[Part], Tensor]) -> list[tuple[Tensor, int]]:
        """Messages with their destinations: as they lie, if that is in one run, else packed."""
        space, at = self._staging.take(), 0
        packed = []
        for send in load:
            data = _flat(read(send.parts[0])) if len(send.parts) == 1 else None
            if data is None:
                data = _region(space, at, send.num_bytes)
                _pack(send.parts, data, read)
                at += send.num_bytes
            packed.append((data, send.to))
        return packed

    def _read(self, flight: _Flight) -> Callable[[Part], Tensor]:
        def read(part: Part) -> Tensor:
            if part.local is not None:
                return _box(self._held, part)
            assert flight.into is not None
            return _region(flight.into, part.offset, part.num_bytes)

        return read


class _Staging:
    """Two buffers to send from, which take turns."""

    def __init__(self, num_bytes: int, device: torch.device, wait: Callable[[Sequence[InFlight], int], None]) -> None:
        """`wait` for messages of a round."""
        self._spaces = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._under_way: list[tuple[Sequence[InFlight], int]] = [((), 0), ((), 0)]
        self._turn, self._wait = 0, wait

    def take(self) -> Tensor:
        """The next, once it has been sent."""
        self._turn = 1 - self._turn
        self._wait(*self._under_way[self._turn])
        return self._spaces[self._turn]

    def sent(self, messages: Sequence[InFlight], index: int) -> None:
        """It is being sent, in round `index`."""
        self._under_way[self._turn] = messages, index

    def wait(self) -> None:
        """Everything has been sent."""
        for messages, index in self._under_way:
            self._wait(messages, index)

    def drop(self) -> None:
        """Free the buffers."""
        self._spaces, self._under_way = [], []


def _loads(sends: Sequence[Send], limit: int) -> Iterator[Sequence[Send]]:
    """Messages that fit the staging buffer together."""
    load: list[Send] = []
    size = 0
    for send in sends:
        if load and size + send.num_bytes > limit:
            yield load
            load, size = [], 0
        load.append(send)
        size += send.num_bytes
    if load:
        yield load


def _pack(parts: Sequence[Part], space: Tensor, read: Callable[[Part], Tensor]) -> None:
    """One after another into `space`."""
    at = 0
    for part in parts:
        box = read(part)
        _region(space, at, part.num_bytes).view(box.dtype).view(box.shape).copy_(box, non_blocking=True)
        at += part.num_bytes


def _stacked(boxes: Sequence[Box]) -> Box | None:
    """The union of boxes that follow one another along the first dimension, or None."""
    for box, after in pairwise(boxes):
        if box[1:] != after[1:] or box[0][1] != after[0][0]:
            return None
    return ((boxes[0][0][0], boxes[-1][0][1]), *boxes[0][1:])


def _flat(box: Tensor) -> Tensor | None:
    """The box's bytes as they lie, or None where it is not contiguous."""
    return box.view(-1).view(torch.uint8) if box.is_contiguous() else None


def _box(tensors: Mapping[str, Tensor], part: Part) -> Tensor:
    assert part.local is not None
    return tensors[part.local][slices(part.box)]


def _slot(flight: _Flight, slot: BoxSlot) -> Tensor:
    assert flight.into is not None
    region = _region(flight.into, slot.offset, slot.num_bytes)
    return region.view(torch_dtype(slot.dtype)).view(extent(slot.local_box))


def _region(data: Tensor, offset: int, num_bytes: int) -> Tensor:
    return data.narrow(0, offset, num_bytes)


def _nothing() -> None: ...
