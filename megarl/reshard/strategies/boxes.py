"""`micro_dp` and `exact`: every rank receives the boxes that its engine rank needs and it does not hold, and no others.

They differ in who serves whom (`megarl.reshard.placement`) and in whom a rank prefers to ask: `micro_dp` its micro-DP
group, HybridFlow's all-gather; `exact` anyone, which also serves sizes that do not divide.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megarl.reshard.cache import cached_moves, cached_rounds
from megarl.reshard.executor import BoxExecutor
from megarl.reshard.strategy import Outlets, SyncContext, SyncStats


class BoxStrategy:
    """Plans once, from layouts alone, and runs the plan at every push."""

    def __init__(self, context: SyncContext, bucket_bytes: int) -> None:
        moves = cached_moves(context.sources, context.needs, context.topology, context.groups)
        # Two buckets to receive into, and what is packed to be sent: within two of the configured size
        self._rounds = cached_rounds(moves, context.rank, bucket_bytes // 2)
        self._rank = context.rank

    def push(self, tensors: Mapping[str, Tensor], outlets: Outlets) -> SyncStats:
        """See `Strategy.push`."""
        executor = BoxExecutor(self._rank, self._rounds)
        executor.run(tensors, outlets.boxes)
        books = executor.ledger
        return SyncStats(
            bytes_sent=books.bytes_sent,
            bytes_received=books.bytes_received,
            bytes_delivered=books.bytes_delivered,
            buckets=books.buckets,
            peak_extra_bytes=books.peak_extra_bytes,
            messages=books.messages,
            collectives=books.collectives,
        )

    def close(self) -> None:
        """Buffers live for one push only."""
