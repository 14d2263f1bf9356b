"""Counts bytes and calls as they are sent and received, for comparison with the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.transport import Deadline, InFlight, Transport, wait_for


@dataclass(slots=True)
class ByteCounter:
    """Sends and receives for one rank, and counts the bytes, messages, collectives and memory of a sync."""

    transport: Transport = field(default_factory=Transport)
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_delivered: int = 0
    """Bytes delivered to engines."""
    messages: int = 0
    """Number of point-to-point messages received."""
    collectives: int = 0
    """Number of collective calls that this rank took part in."""
    buckets: int = 0
    peak_extra_bytes: int = 0
    """Peak of the memory allocated beyond the parameters."""
    _extra_bytes: int = field(default=0, repr=False)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        """Start the messages and count them; arguments and result as for `Transport.start`."""
        self.bytes_sent += sum(tensor.nbytes for tensor, _ in sends)
        self.bytes_received += sum(tensor.nbytes for tensor, _ in receives)
        self.messages += len(receives)
        return self.transport.start(sends, receives)

    def start_all_gathers(self, gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[InFlight]:
        """Start several all-gathers, each given as (output, this rank's share).

        The output receives the shares of all members in rank order; this rank's share may be a view of it. Over gloo
        the members exchange the shares of all gathers as messages, because torch's all-gather for gloo allocates a
        second output and copies it.
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
            for messages in Transport(group).start(sends, receives)
            for message in messages
        ]

    def all_gather(self, out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        """Run one all-gather to completion; see `start_all_gathers`.

        Raises:
            WeightSyncError: another member is lost or late.
        """
        self._finish(lambda: self.start_all_gathers([(out, mine)], group))

    def _finish(self, start: Callable[[], list[InFlight]]) -> None:
        try:
            wait_for(start(), Deadline(self.transport.timeout_seconds))
        except WeightSyncError as e:
            raise WeightSyncError(f"rank {dist.get_rank()}: {e}") from e

    def _count_gather(self, out: Tensor, mine: Tensor) -> None:
        self.bytes_sent += out.nbytes - mine.nbytes
        self.bytes_received += out.nbytes - mine.nbytes
        self.collectives += 1

    def broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """Broadcast from global rank `source` to the other members of the group; raises as `all_gather` does."""
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
        """Count an allocation of temporary memory."""
        self._extra_bytes += num_bytes
        self.peak_extra_bytes = max(self.peak_extra_bytes, self._extra_bytes)

    def free(self, num_bytes: int) -> None:
        """Count the release of temporary memory."""
        self._extra_bytes -= num_bytes

    def stats(self) -> SyncStats:
        """Return the counts of this sync."""
        return SyncStats(
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            bytes_delivered=self.bytes_delivered,
            buckets=self.buckets,
            peak_extra_bytes=self.peak_extra_bytes,
            messages=self.messages,
            collectives=self.collectives,
        )
