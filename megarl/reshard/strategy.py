"""What every way of moving weights has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megarl.config.weight_sync import WeightSyncConfig
from megarl.reshard.layout import WeightLayout
from megarl.reshard.sink import WeightSink


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats:
    """What one sync moved, as this rank counted it at its send and receive calls."""

    bytes_sent: int
    """To other trainer ranks."""
    bytes_received: int
    """From other trainer ranks."""
    bytes_delivered: int
    """To rollout engines."""
    buckets: int


class Strategy(Protocol):
    """Called on every trainer rank at the same time."""

    def push(self, tensors: Mapping[str, Tensor], sinks: Sequence[WeightSink]) -> SyncStats:
        """Deliver the model to `sinks` (empty on ranks that do not deliver).

        Args:
            tensors: this rank's parameters under the names that its layout uses.

        Raises:
            WeightSyncError: a sink did not take a bucket.
        """
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...


def make_strategy(
    config: WeightSyncConfig, *, rank: int, layouts: Sequence[WeightLayout], senders: Sequence[int]
) -> Strategy:
    """The strategy that `weight_sync.strategy` names.

    Args:
        layouts: of every trainer rank, by rank.
        senders: ranks that deliver to engines.
    """
    from megarl.reshard.strategies.gather_hf import GatherHf

    match config.strategy:
        case "gather_hf":
            return GatherHf(rank=rank, layouts=layouts, senders=senders, bucket_bytes=config.bucket_bytes)
