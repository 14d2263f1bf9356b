"""Sinks: the destinations to which a strategy delivers weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket


class WeightSink(Protocol):
    """A rollout engine that loads full tensors. Every call raises WeightSyncError on failure."""

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Start loading the bucket into the engine's parameters.

        Returns:
            A function that blocks until the engine no longer reads the bucket.
        """
        ...


class ShardSink(Protocol):
    """One tensor-parallel rank of an engine in another process, to which its trainer rank delivers boxes."""

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Start writing the boxes of round `index` into the engine's parameters.

        Args:
            bucket: the boxes; None if the round has none.

        Returns:
            A function that blocks until the bucket may be overwritten; raises WeightSyncError on failure.
        """
        ...


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a tensor-parallel engine rank that this process writes directly, without a shared bucket."""

    tensors: Mapping[str, Tensor]
    """Name in the rank's layout -> tensor, viewed with as many dimensions as its boxes have."""
