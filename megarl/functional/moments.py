"""Means and variances from those of groups, which are the same in whatever parts the groups are computed.

Shapes: G groups; K values of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupMoments:
    """Count, mean and squared deviations of the values of each group.

    Those of a group depend on its own values only, in their order; those of all groups are sums over groups, in their
    order and in float64.

    Examples:
        >>> moments = GroupMoments.of(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]), 2)
        >>> moments.mean, moments.variance()
        (3.0, 4.666666666666667)
    """

    count_G: NDArray[np.int64]
    mean_G: NDArray[np.float64]
    """0 for a group without values."""
    squares_G: NDArray[np.float64]
    """Sum of the squared deviations from the group's own mean."""

    @classmethod
    def of(cls, values_K: Tensor, groups_K: Tensor, num_groups: int) -> GroupMoments:
        """Return the moments of `num_groups` groups.

        Args:
            groups_K: int64 index of the group of each value, ascending.
        """
        values_K, groups_K = values_K.double(), groups_K.contiguous()
        count_G = torch.bincount(groups_K, minlength=num_groups)
        first_G = torch.zeros(num_groups, dtype=torch.double)
        starts_G = count_G.cumsum(0) - count_G
        first_G[count_G > 0] = values_K[starts_G[count_G > 0]]
        # relative to a value of the group: equal values have this mean exactly, and variance 0
        relative_K = values_K - first_G[groups_K]
        mean_G = torch.bincount(groups_K, relative_K, num_groups) / count_G.clamp(min=1)
        squares_G = torch.bincount(groups_K, (relative_K - mean_G[groups_K]) ** 2, num_groups)
        return cls(count_G.numpy(), (first_G + mean_G).numpy(), squares_G.numpy())

    @classmethod
    def concatenate(cls, parts: Iterable[GroupMoments], order: NDArray[np.int64]) -> GroupMoments:
        """Return the moments of the groups of all parts, the i-th of which is number `order[i]` of them."""
        columns = zip(*((part.count_G, part.mean_G, part.squares_G) for part in parts), strict=True)
        count_G, mean_G, squares_G = (np.concatenate(column)[order] for column in columns)
        return cls(count_G, mean_G, squares_G)

    @property
    def count(self) -> int:
        """Number of values of all groups."""
        return int(self.count_G.sum())

    @property
    def mean(self) -> float:
        """Mean of the values of all groups; 0 if there are none."""
        if not self.count:
            return 0.0
        first = self.mean_G[np.argmax(self.count_G > 0)]
        return float(first + (self.count_G * (self.mean_G - first)).sum() / self.count)

    def variance(self, *, unbiased: bool = False) -> float:
        """Return the variance of the values of all groups; 0 if there are none.

        Args:
            unbiased: divide by n - 1 instead of n.
        """
        squares = (self.squares_G + self.count_G * (self.mean_G - self.mean) ** 2).sum()
        return float(squares) / max(1, self.count - unbiased)
