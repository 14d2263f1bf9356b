"""Runs a plan on one rank: pack, wire, hand over, in two buckets that take turns.

    round k        pack -> send/receive -> bucket 0 -> engine reads it ------------.
    round k + 1                            pack -> send/receive -> bucket 1 -> ... |
    round k + 2                                         waits for bucket 0 <-------'

Boxes arrive in the bucket in the order of the plan, and the engine writes them straight into its parameters: nothing is
unpacked in between, and no whole tensor is ever put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megarl.reshard.bucket import BoxBucket, BoxSlot, SharedBuffer
from megarl.reshard.layout import slices
from megarl.reshard.ledger import Ledger
from megarl.reshard.plan import Move
from megarl.reshard.rounds import Round, message_bytes
from megarl.reshard.sink import BoxSink


class BoxExecutor:
    """One rank's rounds, and the buckets that they pass through."""

    def __init__(self, rank: int, rounds: Sequence[Round]) -> None:
        self._rank, self._rounds = rank, rounds
        self._largest = max((r.bucket_bytes for r in rounds), default=0)
        self.ledger = Ledger()

    def run(self, tensors: Mapping[str, Tensor], sink: BoxSink | None) -> None:
        """Move everything; collective over all ranks of the plan."""
        buffers = [SharedBuffer(self._largest) for _ in range(2)] if sink is not None else []
        for buffer in buffers:
            self.ledger.allocate(buffer.num_bytes)
        pending: list[Callable[[], None]] = [_nothing, _nothing]
        try:
            for index, this in enumerate(self._rounds):
                which = index % 2
                pending[which]()
                self._exchange(this, tensors, buffers[which] if buffers else None)
                if sink is not None:
                    pending[which] = sink.load_boxes(index, self._bucket(this, buffers[which]))
            for wait in pending:
                wait()
        finally:
            for buffer in buffers:
                buffer.close()
                self.ledger.free(buffer.num_bytes)

    def _exchange(self, this: Round, tensors: Mapping[str, Tensor], buffer: SharedBuffer | None) -> None:
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        sends = {to: _pack(moves, tensors, device) for to, moves in this.sends.items()}
        regions, receives = {}, {}
        for source, moves in this.receives.items():
            assert buffer is not None
            region = buffer.bytes[this.offsets[source] :][: message_bytes(moves)]
            if source == self._rank:
                _copy(moves, tensors, region)
            else:
                regions[source] = region
                # NCCL receives in device memory; gloo in the bucket itself
                receives[source] = region if device.type == "cpu" else torch.empty_like(region, device=device)
        extra = sum(t.nbytes for t in sends.values())
        extra += sum(t.nbytes for source, t in receives.items() if t is not regions[source])
        self.ledger.allocate(extra)
        self.ledger.exchange(sends, receives)
        for source, region in regions.items():
            if receives[source] is not region:
                region.copy_(receives[source])
        self.ledger.free(extra)

    def _bucket(self, this: Round, buffer: SharedBuffer) -> BoxBucket | None:
        if not this.receives:
            return None
        slots = []
        for source, moves in this.receives.items():
            at = this.offsets[source]
            for move in moves:
                slots.append(BoxSlot(move.local, move.local_box, move.dtype, at))
                at += move.num_bytes
        self.ledger.buckets += 1
        self.ledger.bytes_delivered += sum(message_bytes(moves) for moves in this.receives.values())
        return BoxBucket(buffer.path, buffer.num_bytes, tuple(slots))


def _pack(moves: Sequence[Move], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    packed = torch.empty(message_bytes(moves), dtype=torch.uint8, device=device)
    _copy(moves, tensors, packed)
    return packed


def _copy(moves: Sequence[Move], tensors: Mapping[str, Tensor], region: Tensor) -> None:
    at = 0
    for move in moves:
        box = tensors[move.source_local][slices(move.source_box)]
        region[at : at + move.num_bytes].view(box.dtype).view(box.shape).copy_(box)
        at += move.num_bytes


def _nothing() -> None: ...
