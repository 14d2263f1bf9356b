"""Sinks: the destinations to which a strategy delivers weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megarl.reshard.layout.boxes import Ints
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
    """A destination outside of this process's parameters, to which a trainer rank delivers the boxes of its rounds."""

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Start to write the boxes of round `index`, once per round and in order.

        Args:
            bucket: the boxes, or their codes after `expect_codes`; None if the round has none.

        Returns:
            A function that blocks until the bucket may be overwritten; raises WeightSyncError on failure.
        """
        ...


@runtime_checkable
class CodeSink(ShardSink, Protocol):
    """A `ShardSink` that takes codes of changed elements, too (`megarl.reshard.transfer.element_code`)."""

    def expect_codes(self, rounds: Sequence[Ints]) -> None:
        """Expect codes in place of boxes, in the sync that begins.

        Args:
            rounds: by round, `megarl.reshard.planning.delta.CodedRound.lines`.
        """
        ...


class DiscardSink:
    """A `ShardSink` that drops the boxes: this rank takes part in the rounds for the sake of the others."""

    def expect_codes(self, rounds: Sequence[Ints]) -> None:
        """Drop the codes of the next sync, too."""

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Drop the boxes; the returned function does not wait."""
        del index, bucket
        return lambda: None


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a tensor-parallel engine rank that this process writes directly, without a shared bucket."""

    tensors: Mapping[str, Tensor]
    """Name in the rank's layout -> tensor, viewed with as many dimensions as its boxes have. Tensors that are received
    in full only are not among them."""
    model_device: torch.device | None = None
    """Device of the model; None: that of `tensors`."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU if there are none."""
        if self.model_device is not None:
            return self.model_device
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
