"""Sums over the sequences of a pack. Shapes: T packed tokens (or a rank's share of them), S sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence each token of a pack, or of a rank's share of one, belongs to.

    >>> sequences = Sequences.of(torch.tensor([0, 2, 5]))
    >>> sequences.ids_T.tolist()
    [0, 0, 1, 1, 1]
    >>> sequences.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist()
    [3.0, 12.0]
    """

    ids_T: Tensor
    """int64 [T], 0 to count - 1."""

    count: int
    """S, of the whole pack."""

    reduce: Callable[[Tensor], Tensor] | None = None
    """Adds an [S] tensor up over the context-parallel ranks that hold the other tokens; differentiable, its gradient is
    added up over them as well. None: this rank holds all tokens."""

    @classmethod
    def of(cls, cu_seqlens_S: Tensor) -> Sequences:
        """Those of a whole pack, from the [S + 1] bounds of its sequences."""
        count = len(cu_seqlens_S) - 1
        ids_S = torch.arange(count, device=cu_seqlens_S.device)
        return cls(ids_S.repeat_interleave(cu_seqlens_S.diff()), count)

    def sum(self, values_T: Tensor) -> Tensor:
        """[S] each sequence's sum, over all ranks."""
        sums_S = values_T.new_zeros(self.count).index_add(0, self.ids_T, values_T)
        return sums_S if self.reduce is None else self.reduce(sums_S)

    def mean(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """[S] each sequence's mean over the tokens that count, over all ranks; 0 where none does."""
        count_S = self.sum(mask_T.to(values_T.dtype))
        return self.sum(torch.where(mask_T, values_T, torch.zeros_like(values_T))) / count_S.clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """[T] to each token its sequence's value."""
        return values_S.index_select(0, self.ids_T)
