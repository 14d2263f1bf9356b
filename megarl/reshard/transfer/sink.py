"""Where a strategy hands weights over: one sink per rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket


class WeightSink(Protocol):
    """A rollout engine as a trainer rank sees it during a sync. Every call raises WeightSyncError on failure."""

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Start writing the bucket into the engine's parameters.

        Returns:
            A function that blocks until the engine no longer reads the bucket.
        """
        ...


class BoxSink(Protocol):
    """One tensor-parallel rank of an engine, as the trainer rank that serves it sees it."""

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Start writing round `index`'s boxes (None: there are none) into the engine's parameters.

        Returns:
            A function that blocks until the bucket may be overwritten; raises WeightSyncError on failure.
        """
        ...


@dataclass(frozen=True, slots=True)
class Parameters:
    """One tensor-parallel rank of an engine whose parameters this process may write: no bucket lies in between."""

    tensors: Mapping[str, Tensor]
    """By the names that the rank's layout uses; seen with as many dimensions as the boxes have."""
