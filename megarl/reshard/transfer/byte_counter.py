"""Counts bytes and calls where they cross the wire, for comparison with what was planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.transport import Deadline, InFlight, Wire, wait_for


@dataclass(slots=True)
class Ledger:
    """One rank's books; every send and receive of an executor goes through it."""

    wire: Wire = field(default_factory=Wire)
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_delivered: int = 0
    """Handed to engines."""
    messages: int = 0
    """Point-to-point messages received."""
    collectives: int = 0
    """Collective calls that this rank took part in."""
    buckets: int = 0
    peak_extra_bytes: int = 0
    """The most that was allocated beyond parameters at one time."""
    _extra_bytes: int = field(default=0, repr=False)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        """As `Wire.start`."""
        self.bytes_sent += sum(tensor.nbytes for tensor, _ in sends)
        self.bytes_received += sum(tensor.nbytes for tensor, _ in receives)
        self.messages += len(receives)
        return self.wire.start(sends, receives)

    def start_all_gathers(self, gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[InFlight]:
        """Several all-gathers: of each, every member's part, in the order of ranks, into the first tensor.

        The second tensor is this rank's part, which may lie in the first. Over gloo the members exchange their parts,
        of all gathers together: torch's own all-gather takes a second output there, and copies.
        """
        for out, mine in gathers:
            self._count_gather(out, mine)
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        others = [member for member in range(group.size()) if member != me]
        if dist.get_backend(group) != "gloo":
            started = [dist.all_gather_into_tensor(o, m, group=group, async_op=True) for o, m in gathers]
            return [InFlight(work, tuple(ranks[member] for member in others), True) for work in started if work]
        sends, receives = [], []
        for out, mine in gathers:
            parts = out.view(group.size(), -1)
            if parts[me].data_ptr() != mine.data_ptr():
                parts[me].copy_(mine)
            sends += [(mine, member) for member in others]
            receives += [(parts[member], member) for member in others]
        return [
            InFlight(message.work, tuple(ranks[member] for member in message.peers), message.is_receive)
            for messages in Wire(group).start(sends, receives)
            for message in messages
        ]

    def all_gather(self, out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        """One all-gather, start to end; see `start_all_gathers`.

        Raises:
            WeightSyncError: another member is gone or late.
        """
        self._finish(lambda: self.start_all_gathers([(out, mine)], group))

    def _finish(self, start: Callable[[], list[InFlight]]) -> None:
        try:
            wait_for(start(), Deadline(self.wire.timeout_seconds))
        except WeightSyncError as e:
            raise WeightSyncError(f"rank {dist.get_rank()}: {e}") from e

    def _count_gather(self, out: Tensor, mine: Tensor) -> None:
        self.bytes_sent += out.nbytes - mine.nbytes
        self.bytes_received += out.nbytes - mine.nbytes
        self.collectives += 1

    def broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """From rank `source` (of the world) to the other members; raises as `all_gather` does."""
        is_source = dist.get_rank() == source
        others = tuple(rank for rank in dist.get_process_group_ranks(group) if rank != source)

        def start() -> list[InFlight]:
            work = dist.broadcast(tensor, source, group=group, async_op=True)
            assert work is not None, "this rank is not in the group"
            return [InFlight(work, others if is_source else (source,), not is_source)]

        self._finish(start)
        if is_source:
            self.bytes_sent += tensor.nbytes * (group.size() - 1)
        else:
            self.bytes_received += tensor.nbytes
        self.collectives += 1

    def allocate(self, num_bytes: int) -> None:
        """Temporary memory came into being."""
        self._extra_bytes += num_bytes
        self.peak_extra_bytes = max(self.peak_extra_bytes, self._extra_bytes)

    def free(self, num_bytes: int) -> None:
        """It is gone."""
        self._extra_bytes -= num_bytes

    def stats(self) -> SyncStats:
        """What was counted."""
        return SyncStats(
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            bytes_delivered=self.bytes_delivered,
            buckets=self.buckets,
            peak_extra_bytes=self.peak_extra_bytes,
            messages=self.messages,
            collectives=self.collectives,
        )
