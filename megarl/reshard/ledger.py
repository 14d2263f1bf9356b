"""Counts bytes and calls where they cross the wire, for comparison with what was planned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Ledger:
    """One rank's books; every send and receive of an executor goes through it."""

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

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """Post all sends and receives of a round together, and wait for them."""
        work = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sends.items()]
        work += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives.items()]
        self.bytes_sent += sum(t.nbytes for t in sends.values())
        self.bytes_received += sum(t.nbytes for t in receives.values())
        self.messages += len(receives)
        for request in dist.batch_isend_irecv(work) if work else ():
            request.wait()

    def all_gather(self, out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        """Every member's `mine`, in the order of ranks, into `out`; `mine` may be this rank's part of `out`."""
        dist.all_gather_into_tensor(out, mine, group=group)
        self.bytes_sent += out.nbytes - mine.nbytes
        self.bytes_received += out.nbytes - mine.nbytes
        self.collectives += 1

    def broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """From rank `source` (of the world) to the other members."""
        dist.broadcast(tensor, source, group=group)
        if dist.get_rank() == source:
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

    @property
    def extra_bytes(self) -> int:
        """Temporary memory that is still allocated."""
        return self._extra_bytes
