"""One rank's part of delta syncs: digests of what it has sent, and the exchange of what has changed.

    base None     a full sync: keep digests of all pieces
    base 41       compare with the digests of sync 41, exchange marks, select the rounds' changed pieces

A rank keeps the digests of the latest sync only, and only once it has done its part of it. The controller gives the
base: the sync after which every engine that takes part has served all of the weights. After a failed sync, new
connections, a restarted engine or a resumed run there is none, and the sync is full.

A changed piece is taken for unchanged if both contents have the same digest. A digest has 128 bits (BLAKE2b) on the
CPU: for one piece of one sync, the chance is about 2**-128. On a GPU it is the sum of `megarl_kernels.checksum_boxes`,
of 64 bits, computed where the weights are: about 2**-64, or 5e-8 for a run of a million syncs of a million pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.boxes import Ints
from megarl.reshard.planning.delta import DeltaPlan, HeldBox, SelectedRound
from megarl.reshard.planning.rounds import Round
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.box_views import view_box
from megarl.reshard.transfer.bucket import digest
from megarl.reshard.transfer.byte_counter import ByteCounter
from megarl.reshard.transfer.executor import BoxExecutor, BufferSizes, device_of
from megarl.reshard.transfer.sink import Parameters, SelectingSink, ShardSink
from megarl.reshard.transfer.transport import Deadline, InFlight, Transport, closed_on_failure, wait_for
from megarl_kernels import checksum_boxes

DIGEST_BYTES = 16
"""Of a digest on the CPU."""


class DeltaSync:
    """Runs the syncs of one rank's rounds, and keeps digests of what it has sent."""

    def __init__(self, rank: int, rounds: Sequence[Round], gather_group: dist.ProcessGroup | None = None) -> None:
        """`gather_group`: process group of the plan's all-gathers; None if it has none."""
        self._rank, self._rounds, self._gather_group = rank, tuple(rounds), gather_group
        member = -1 if gather_group is None else gather_group.rank()
        self.plan = DeltaPlan(self._rounds, member)
        self._base: tuple[int, Ints] | None = None
        """Number of the latest sync, and the digests of what was sent, uint8 [num_held, bytes of a digest]."""

    def run(
        self,
        tensors: Mapping[str, Tensor],
        sink: ShardSink | Parameters | None,
        update: DeltaUpdate,
        transport: Transport,
        deadline: Deadline | None = None,
    ) -> SyncStats:
        """Run a sync, as `BoxExecutor.run`; collective over all ranks of the plan, with the same `update`.

        Raises:
            WeightSyncError: this rank has no digests of the base, or another rank is lost or late.
        """
        counter = ByteCounter(transport)
        deadline = deadline or Deadline(transport.timeout_seconds)
        rounds = self._rounds
        base, self._base = self._base, None
        with closed_on_failure(transport, self._gather_group):
            digests = self._digest(tensors, transport)
            counter.pieces = counter.changed_pieces = self.plan.num_held
            if update.base is not None:
                if base is None or base[0] != update.base:
                    raise WeightSyncError(f"rank {self._rank} has no digests of sync {update.base}")
                changed = (digests != base[1]).any(axis=1)
                selected = self._select(changed, counter, deadline, device_of(tensors, sink))
                rounds = tuple(each.round for each in selected)
                if isinstance(sink, SelectingSink):
                    sink.select_boxes([each.slots for each in selected])
        sizes = BufferSizes.for_rounds(rounds)
        BoxExecutor(self._rank, rounds, sizes, self._gather_group, counter=counter).run(tensors, sink, deadline)
        self._base = update.number, digests
        return counter.stats()

    def _select(
        self, changed: Ints, counter: ByteCounter, deadline: Deadline, device: torch.device
    ) -> list[SelectedRound]:
        """Return the rounds to execute; `changed`: bool [num_held]."""
        try:
            marks, gathers = self._exchange(changed, counter, deadline, device)
        except WeightSyncError as e:
            raise type(e)(f"rank {self._rank}: marks of changed weights: {e}") from e
        selected = self.plan.select(marks, gathers)
        counter.changed_pieces = int(changed.sum())
        for full, some in zip(self._rounds, selected, strict=True):
            counter.bytes_not_received += _bytes_received(full) - _bytes_received(some.round)
            counter.bytes_not_delivered += full.bytes_delivered - some.round.bytes_delivered
        return selected

    def _digest(self, tensors: Mapping[str, Tensor], transport: Transport) -> Ints:
        """Return the digests of all pieces of the boxes that this rank holds, uint8 [num_held, bytes of a digest]."""
        if self.plan.held and tensors[self.plan.held[0].local].is_cuda:
            pieces = [piece for each in self.plan.held for piece in _pieces(each, tensors[each.local])]
            return checksum_boxes(pieces).cpu().numpy().view(np.uint8).reshape(self.plan.num_held, -1)
        found: list[bytes] = []
        for each in self.plan.held:
            found += [digest(piece) for piece in _pieces(each, tensors[each.local])]
            transport.activity.progress += 1  # the others wait for this rank
        return np.frombuffer(b"".join(found), np.uint8).reshape(self.plan.num_held, DIGEST_BYTES)

    def _exchange(
        self, changed: Ints, counter: ByteCounter, deadline: Deadline, device: torch.device
    ) -> tuple[Ints, Ints]:
        """Return the marks of all pieces [num_marks], and which all-gathers run [num_gathers]."""
        plan, marks = self.plan, np.zeros(self.plan.num_marks, bool)
        marks[: plan.num_held] = changed
        gathers = self._exchange_gathers(plan.own_gather_marks(marks), counter, deadline, device)
        plan.mark_gathered(marks, gathers)
        sent: list[InFlight] = []
        for outgoing, incoming in zip(plan.outgoing, plan.incoming, strict=True):
            sends = [(_pack(marks[indices], device), to) for to, indices in outgoing.items()]
            receives = [(_space(which.stop - which.start, device), source) for source, which in incoming.items()]
            received, started = counter.exchange_marks(sends, receives)
            sent += started
            wait_for(received, deadline)
            for (data, _), which in zip(receives, incoming.values(), strict=True):
                marks[which] = _unpack(data, which.stop - which.start)
        wait_for(sent, deadline)
        return marks, gathers

    def _exchange_gathers(self, own: Ints, counter: ByteCounter, deadline: Deadline, device: torch.device) -> Ints:
        if not len(own):
            return own
        assert self._gather_group is not None
        mine = _pack(own, device)
        out = torch.empty(self._gather_group.size() * len(mine), dtype=torch.uint8, device=device)
        wait_for(counter.gather_marks(out, mine, self._gather_group), deadline)
        of_members = out.view(self._gather_group.size(), -1)
        gathers: Ints = np.any([_unpack(of_member, len(own)) for of_member in of_members], axis=0)
        return gathers


def _bytes_received(this: Round) -> int:
    gathered = sum(gather.num_bytes - gather.share for gather in this.gathers)
    return gathered + sum(message.num_bytes for hop in this.hops for message in hop.receives)


def _pieces(held: HeldBox, tensor: Tensor) -> list[Tensor]:
    """Return the pieces of a box, [rows, elements of a row], in most cases as views."""
    cut = held.cut
    box = view_box(tensor, held.box, cut.rows * cut.row_bytes).reshape(cut.rows, -1)
    return [box[start:stop] for start, stop in cut.pieces]


def _pack(marks: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.packbits(marks)).to(device)


def _space(num_marks: int, device: torch.device) -> Tensor:
    return torch.empty(-(-num_marks // 8), dtype=torch.uint8, device=device)


def _unpack(data: Tensor, num_marks: int) -> Ints:
    return np.unpackbits(data.cpu().numpy(), count=num_marks).view(bool)
