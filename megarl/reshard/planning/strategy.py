"""What every way of moving weights has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.micro_dp import Cells
from megarl.reshard.layout.topology import Topology
from megarl.reshard.transfer.sink import BoxSink, Parameters, WeightSink


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
    peak_extra_bytes: int
    """The most that was allocated beyond parameters at one time."""
    messages: int = 0
    """Point-to-point messages received."""
    collectives: int = 0

    def __add__(self, after: SyncStats) -> SyncStats:
        """Of two parts of a sync, one after the other; the memory of one is free before the other begins."""
        return SyncStats(
            bytes_sent=self.bytes_sent + after.bytes_sent,
            bytes_received=self.bytes_received + after.bytes_received,
            bytes_delivered=self.bytes_delivered + after.bytes_delivered,
            buckets=self.buckets + after.buckets,
            peak_extra_bytes=max(self.peak_extra_bytes, after.peak_extra_bytes),
            messages=self.messages + after.messages,
            collectives=self.collectives + after.collectives,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncContext:
    """What a strategy plans from; the same on every rank, but for `rank`."""

    rank: int
    sources: Sequence[WeightLayout]
    """By trainer rank."""
    topology: Topology
    senders: Sequence[int] = ()
    """Ranks that deliver whole tensors."""
    whole: Sequence[str] = ()
    """Tensors that engines take whole even where all others go as boxes; see `RolloutEngine.whole_tensors`."""
    needs: Mapping[int, WeightLayout] = field(default_factory=dict)
    """By trainer rank that serves one, the layout of an engine's rank."""
    groups: Sequence[Sequence[int]] = ()
    """Micro-DP groups, where the layouts have them."""
    copies: Sequence[Sequence[Cells]] = ()
    """See `replica_cells`; for `gather_hf`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where one trainer rank delivers; empty on ranks that do not."""

    whole: tuple[WeightSink, ...] = ()
    """Engines that take whole tensors by name; beside boxes, where some tensors go this way and the others that."""
    boxes: BoxSink | Parameters | None = None
    """The engine rank that this trainer rank serves."""


class Strategy(Protocol):
    """Called on every trainer rank at the same time."""

    def push(self, tensors: Mapping[str, Tensor], outlets: Outlets) -> SyncStats:
        """Deliver the model.

        Args:
            tensors: this rank's parameters under the names that its layout uses.

        Raises:
            WeightSyncError: an engine did not take a bucket.
        """
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...
