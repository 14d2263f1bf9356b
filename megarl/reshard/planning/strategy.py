"""The interface of weight-sync strategies, with their inputs and statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megarl.reshard.layout.engine_ranks import ModelReplica
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.transfer.bucket import Parameters, ShardSink, WeightSink


@dataclass(kw_only=True)  # without slots: pickled in C, by each of thousands of ranks
class SyncStats:
    """Statistics of one sync, counted by this rank at its send and receive calls."""

    bytes_sent: int = 0
    """Bytes sent to other ranks."""
    bytes_received: int = 0
    """Bytes received from other ranks."""
    bytes_delivered: int = 0
    """Bytes delivered to rollout engines."""
    buckets: int = 0
    peak_extra_bytes: int = 0
    """Peak of the memory that the sync uses beyond the parameters. `SyncMemory` keeps what of it is host memory."""
    messages: int = 0
    """Number of point-to-point messages received."""
    collectives: int = 0
    bytes_not_received: int = 0
    """Bytes that a full sync would have received, and that have not changed."""
    bytes_not_delivered: int = 0
    """Bytes that a full sync would have delivered to rollout engines, and that have not changed."""
    count_bytes: int = 0
    """Bytes received that tell how many weights have changed, contained in `bytes_received`."""
    copied_bytes: int = 0
    """Bytes of host memory of the weights that a delta sync compares with, and of the codes of what has changed."""
    elements: int = 0
    """Number of elements of the boxes that this rank sends or copies, if they are compared."""
    changed_elements: int = 0
    """Number of these elements that have changed; all in a full sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaUpdate:
    """What a sync may leave out; plain data, the same on all ranks and engines that take part."""

    number: int
    """Number of this sync, unique in the run."""
    base: int | None = None
    """The sync that all receivers hold: send only what has changed since. None: send all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncContext:
    """Inputs that a strategy plans from; identical on every rank except for `rank`."""

    rank: int
    sources: Sequence[WeightLayout]
    """By trainer rank, the layout it holds."""
    topology: Topology
    senders: Sequence[int] = ()
    """Ranks that deliver full tensors to engines."""
    needs: Mapping[int, WeightLayout] = field(default_factory=dict)
    """By trainer rank that serves an engine rank, the layout that this engine rank receives."""
    groups: Sequence[Sequence[int]] = ()
    """Micro-DP groups; empty if the strategy uses none."""
    model_replicas: Sequence[Sequence[ModelReplica]] = ()
    """[kind][replica] of the trainer, as `engine_ranks.model_replicas` returns; used to gather full tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinks:
    """Destinations of one trainer rank; empty on ranks that deliver nothing."""

    full_tensors: tuple[WeightSink, ...] = ()
    """Engines that load full tensors by name, from `gather_hf`."""
    boxes: ShardSink | Parameters | None = None
    """The engine rank that this trainer rank serves with boxes."""
    wait_ready: Callable[[], None] | None = None
    """Called before the sync; returns once boxes can be delivered."""


class Strategy(Protocol):
    """A weight-sync strategy; its methods are collective over all trainer ranks."""

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks) -> SyncStats:
        """Push the model's weights to the engines.

        Args:
            tensors: this rank's parameters under the names that its layout uses.
            sinks: this rank's destinations.

        Raises:
            WeightSyncError: an engine failed to load a bucket.
        """
        ...

    def close(self) -> None:
        """Free the buffers and process groups."""
        ...
