"""Sums and means over the sequences of a pack. Shapes: T packed tokens (or one rank's share of them), S sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Maps each token of a pack, or of one context-parallel rank's share of it, to its sequence.

    Examples:
        >>> sequences = Sequences.of(torch.tensor([0, 2, 5]))
        >>> sequences.ids_T.tolist()
        [0, 0, 1, 1, 1]
        >>> sequences.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist()
        [3.0, 12.0]
    """

    ids_T: Tensor
    """int64 [T] sequence index of each token, 0 to count - 1."""

    count: int
    """S, the number of sequences of the full pack."""

    reduce: Callable[[Tensor], Tensor] | None = None
    """Sums an [S] tensor over the context-parallel ranks that hold the other tokens; differentiable, its gradient is
    summed over them as well. None: this rank holds all tokens."""

    @classmethod
    def of(cls, cu_seqlens_S: Tensor) -> Sequences:
        """Create the map of a full pack from the [S + 1] cumulative sequence lengths."""
        count = len(cu_seqlens_S) - 1
        ids_S = torch.arange(count, device=cu_seqlens_S.device)
        return cls(ids_S.repeat_interleave(cu_seqlens_S.diff()), count)

    def sum(self, values_T: Tensor) -> Tensor:
        """[S] sum of each sequence, over all ranks."""
        sums_S = values_T.new_zeros(self.count).index_add(0, self.ids_T, values_T)
        return sums_S if self.reduce is None else self.reduce(sums_S)

    def mean(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """[S] mean of each sequence over its tokens inside the mask, over all ranks; 0 if there are none."""
        count_S = self.sum(mask_T.to(values_T.dtype))
        return self.sum(torch.where(mask_T, values_T, torch.zeros_like(values_T))) / count_S.clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """[T] value of each token's sequence."""
        return values_S.index_select(0, self.ids_T)
