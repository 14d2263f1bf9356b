"""One rank's columns of the vocabulary.

Shapes, here and in the ops that use it: t tokens, v columns of this rank, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """This rank's columns of the vocabulary, and how their logits become scores: the input of the softmax.

    score = inv_temperature * softcap * tanh(logit / softcap), without the tanh if `softcap` is None.
    """

    start: int
    """Vocabulary id of this rank's first column."""
    valid_columns: int
    """Number of this rank's columns before those that only pad the vocabulary; they come first. May be 0."""
    inv_temperature: float = 1.0
    softcap: float | None = None
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other columns of the same tokens; None if this rank holds all."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.valid_columns < 0:
            raise ValueError(
                f"vocab_start and valid_columns need at least 0, got {self.start} and {self.valid_columns}"
            )
        if not self.inv_temperature > 0:
            raise ValueError(f"inv_temperature needs to be greater than 0, got {self.inv_temperature}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap needs to be greater than 0, got {self.softcap}; None turns it off")

    def part(self, columns: slice) -> VocabShard:
        """Return the shard of some of the columns."""
        return replace(self, start=self.start + columns.start, valid_columns=columns.stop - columns.start)

    def scores_(self, logits: Tensor) -> Tensor:
        """Turn logits into scores, in place."""
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.inv_temperature == 1.0 else logits.mul_(self.inv_temperature)

    def slopes(self, scores: Tensor) -> Tensor | float:
        """Return the derivative of each score by its logit: a new tensor, or one number if there is no softcap."""
        if self.softcap is None:
            return self.inv_temperature
        tanh = scores / (self.softcap * self.inv_temperature)
        return tanh.square_().neg_().add_(1.0).mul_(self.inv_temperature)

    def check(self, num_columns: int, targets: Tensor, num_tokens: int) -> None:
        """Raise ValueError if this shard does not fit `num_columns` columns, or `targets` do not fit the tokens.

        If this rank has all columns, targets outside of them are an assertion error, of the device on CUDA.
        """
        if self.valid_columns > num_columns:
            raise ValueError(f"valid_columns is {self.valid_columns}, but this rank has {num_columns} columns")
        if targets.shape != (num_tokens,) or targets.dtype != torch.int64:
            raise ValueError(
                f"targets need to be int64 of shape [{num_tokens}], got {targets.dtype} of {list(targets.shape)}"
            )
        if self.group is None or self.group.size() == 1:
            is_known = (targets >= self.start) & (targets < self.start + self.valid_columns)
            torch._assert_async(is_known.all(), "targets need to be ids of the vocabulary")
