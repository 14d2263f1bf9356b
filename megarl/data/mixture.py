"""The order of prompts from several sources in fixed ratios."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import lcm

import numpy as np
from numpy.typing import NDArray

from megarl.data.sampler import PromptOrder

MAX_PERIOD = 10_000
"""Largest number of prompts after which the sequence of sources repeats: ratios have four decimals."""


class MixtureOrder:
    """The order of prompts from several sources: sources alternate by their ratios, each has its own order of rows.

    The sequence of sources has the period P, the common denominator of the ratios. Within a period each prompt comes
    from the source that is furthest behind its ratio (the largest remainder), so that after any number n of prompts
    source j has had n * ratio_j of them, rounded up or down or one off. Rows are numbered over all sources, in their
    order.

    >>> order = MixtureOrder([2, 3], [0.5, 0.5], seed=0, shuffle=False)
    >>> [order.row_at(ordinal) for ordinal in range(6)]
    [0, 2, 1, 3, 0, 4]
    """

    def __init__(self, sizes: Sequence[int], ratios: Sequence[float], seed: int, shuffle: bool) -> None:
        """Make the order of sources with these numbers of rows; the ratios sum to 1, with four decimals each."""
        self.seed = seed
        self._sizes, self._ratios, self._shuffle = sizes, ratios, shuffle
        self._orders = [PromptOrder(size, seed, shuffle, source=j) for j, size in enumerate(sizes)]
        self._starts = [0, *accumulate(sizes)]

    @property
    def num_rows(self) -> int:
        """Number of rows of all sources."""
        return self._starts[-1]

    def with_seed(self, seed: int) -> MixtureOrder:
        """Return the order of the same data with another seed."""
        return MixtureOrder(self._sizes, self._ratios, seed, self._shuffle)

    def source_at(self, ordinal: int) -> int:
        """Return the index of the source of a prompt by its ordinal."""
        return int(self._sources[ordinal % len(self._sources)])

    def row_at(self, ordinal: int) -> int:
        """Return the row of a prompt by its ordinal, from 0."""
        assert ordinal >= 0, f"ordinals count from 0, got {ordinal}"
        period, position = divmod(ordinal, len(self._sources))
        source = int(self._sources[position])
        before = period * self._weights[source] + int(self._ranks[position])
        return self._starts[source] + self._orders[source].row_at(before)

    @cached_property
    def _weights(self) -> list[int]:
        """Number of prompts of each source in a period."""
        return source_weights(self._ratios)

    @cached_property
    def _sources(self) -> NDArray[np.int64]:
        """[P]: source of each prompt of a period."""
        weights = np.array(self._weights, np.int64)
        period, remainders, sources = int(weights.sum()), np.zeros(len(weights), np.int64), []
        for _ in range(period):
            remainders += weights
            sources.append(int(remainders.argmax()))
            remainders[sources[-1]] -= period
        return np.array(sources, np.int64)

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        """[P]: number of earlier prompts of the same source in the period."""
        ranks_P = np.zeros(len(self._sources), np.int64)
        for source in range(len(self._weights)):
            own_P = self._sources == source
            ranks_P[own_P] = np.arange(int(own_P.sum()))
        return ranks_P


def source_weights(ratios: Sequence[float]) -> list[int]:
    """Return the smallest integers in the proportion of the ratios, which have four decimals.

    >>> source_weights([0.5, 0.3, 0.2])
    [5, 3, 2]
    """
    exact = [Fraction(round(ratio * MAX_PERIOD), MAX_PERIOD) for ratio in ratios]
    denominator = lcm(*(each.denominator for each in exact))
    return [int(each * denominator) for each in exact]
