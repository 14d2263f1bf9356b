"""Where a strategy hands weights over: one sink per rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from megarl.reshard.bucket import WeightBucket


class WeightSink(Protocol):
    """A rollout engine as a trainer rank sees it during a sync. Every call raises WeightSyncError on failure."""

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Start writing the bucket into the engine's parameters.

        Returns:
            A function that blocks until the engine no longer reads the bucket.
        """
        ...
