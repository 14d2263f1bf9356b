"""Counts bytes and calls as they are sent and received, for comparison with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.torch_groups import coalesced
from megarl.reshard.transfer.transport import InFlight, Transport


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
    bytes_not_received: int = 0
    bytes_not_delivered: int = 0
    count_bytes: int = 0
    copied_bytes: int = 0
    elements: int = 0
    changed_elements: int = 0
    """Of a delta sync; see `SyncStats`."""
    _extra_bytes: int = field(default=0, repr=False)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        """Start the messages and count them; arguments and result as for `Transport.start`."""
        self.bytes_sent += sum([tensor.nbytes for tensor, _ in sends])
        self.bytes_received += sum([tensor.nbytes for tensor, _ in receives])
        self.messages += len(receives)
        return self.transport.start(sends, receives)

    def exchange_counts(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        """Start messages that tell how many weights have changed, as `exchange`; counted as such, too."""
        self.count_bytes += sum([tensor.nbytes for tensor, _ in receives])
        return self.exchange(sends, receives)

    def gather_counts(self, out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> list[InFlight]:
        """Start an all-gather that tells how many weights have changed; counted as such, too."""
        self.count_bytes += out.nbytes - mine.nbytes
        return self.start_all_gathers([(out, mine)], group)

    def start_all_gathers(self, gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[InFlight]:
        """Start the all-gathers and count them; arguments and result as for `Transport.start_all_gathers`."""
        for out, mine in gathers:
            self._count_gather(out, mine)
        return self.transport.start_all_gathers(gathers, group)

    def _count_gather(self, out: Tensor, mine: Tensor) -> None:
        self.bytes_sent += out.nbytes - mine.nbytes
        self.bytes_received += out.nbytes - mine.nbytes
        self.collectives += 1

    def start_broadcasts(self, broadcasts: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup) -> list[InFlight]:
        """Start several broadcasts, each given as (tensor, global rank of its source); all members pass the same."""
        if not broadcasts:
            return []
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
        others = tuple(rank for rank in ranks if rank != me)
        for tensor, source in broadcasts:
            if source == me:
                self.bytes_sent += tensor.nbytes * len(others)
            else:
                self.bytes_received += tensor.nbytes
            self.collectives += 1
        if dist.get_backend(group) != "gloo":
            with coalesced(group, broadcasts[0][0].device) as started:
                for tensor, source in broadcasts:
                    dist.broadcast(tensor, source, group=group, async_op=True)
            return [InFlight(work, others, True, is_polled=True) for work in started.works]
        started_works = []
        for tensor, source in broadcasts:
            work = dist.broadcast(tensor, source, group=group, async_op=True)
            assert work is not None, "this rank is not in the group"
            started_works.append(InFlight(work, others if source == me else (source,), source != me))
        return started_works

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
            bytes_not_received=self.bytes_not_received,
            bytes_not_delivered=self.bytes_not_delivered,
            count_bytes=self.count_bytes,
            copied_bytes=self.copied_bytes,
            elements=self.elements,
            changed_elements=self.changed_elements,
        )
