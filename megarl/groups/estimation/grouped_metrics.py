"""Metrics of a step that are computed by groups, and the whitening of advantages over all of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, override

import numpy as np
from numpy.typing import NDArray

from megarl.functional import GroupMoments


@dataclass(frozen=True, slots=True)
class OfGroups:
    """What is computed from the moments of the groups of a step, which are the fields of its subclasses."""

    @classmethod
    def merge(cls, parts: Sequence[Self], order: NDArray[np.int64]) -> Self:
        """Return the same for the groups of all parts, the i-th of which is number `order[i]` of them.

        Fields that are no moments are those of the first part.
        """
        merged = {
            name: GroupMoments.concatenate((getattr(part, name) for part in parts), order)
            for name in (each.name for each in fields(cls))
            if isinstance(getattr(parts[0], name), GroupMoments)
        }
        return replace(parts[0], **merged)


class GroupedMetric(OfGroups, ABC):
    """A metric of a step, made of parts that depend on one group each."""

    __slots__ = ()

    @property
    @abstractmethod
    def value(self) -> float:
        """The metric of all groups."""


Metric = float | GroupedMetric


@dataclass(frozen=True, slots=True)
class MeanMetric(GroupedMetric):
    """A mean over tokens or completions."""

    moments: GroupMoments

    @property
    @override
    def value(self) -> float:
        """The mean; 0 over nothing."""
        return self.moments.mean


@dataclass(frozen=True, slots=True)
class ExplainedVariance(GroupedMetric):
    """The share of the variance of returns that a critic's values explain."""

    residuals: GroupMoments
    """Of the returns minus the values."""
    returns: GroupMoments

    @property
    @override
    def value(self) -> float:
        """1 - Var(residuals) / Var(returns); 0 if all returns are equal."""
        variance = self.returns.variance()
        return 1 - self.residuals.variance() / variance if variance > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Whitening(OfGroups):
    """Division of the advantages, minus their mean, by their standard deviation over all sampled tokens of a step."""

    moments: GroupMoments
    """Of the advantages of the sampled tokens."""
    unbiased: bool
    """Whether the variance divides by n - 1; see `megarl.functional.whiten`."""

    @property
    def mean(self) -> float:
        """The mean of the advantages."""
        return self.moments.mean

    @property
    def variance(self) -> float:
        """The variance of the advantages, biased or not."""
        return self.moments.variance(unbiased=self.unbiased)
