"""The buffers of a rank's rounds: their sizes, and the staging buffers to send from."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.reshard.planning.rounds import Round
from megarl.reshard.transfer.transport import InFlight


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
        bucket = max((r.bucket_bytes for r in rounds), default=0)
        num_buckets = max(2, *(len(r.hops) for r in rounds[:1]))
        return cls(bucket, num_buckets, max((hop.staging_bytes for r in rounds for hop in r.hops), default=0))

    def total(self, *, receives: bool) -> int:
        """Return the bytes of all buffers together."""
        return 2 * self.staging + (self.num_buckets * max(self.bucket, mmap.PAGESIZE) if receives else 0)


class StagingBuffers:
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

    def free(self) -> None:
        """Drop the references to both buffers."""
        self._spaces, self._in_flight = [], []
