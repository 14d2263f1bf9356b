"""Endless, shuffled and resumable sampling of row numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.errors import DataError

KEPT_EPOCHS = 2
"""Number of epochs whose order is kept: prompts in flight may belong to the current epoch or the previous one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Position of a sampler, counted in rows; sufficient to resume it."""

    epoch: int
    """Number of times that as many prompts were taken as the data has rows."""
    position: int
    """Number of prompts taken since."""
    seed: int


class RowOrder(Protocol):
    """The order of a run's prompts: a pure function from a prompt's ordinal to its row.

    The ordinal of a prompt is the number of prompts before it.
    """

    @property
    def num_rows(self) -> int:
        """Number of rows of the data."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the order."""
        ...

    def row_at(self, ordinal: int) -> int:
        """Return the row of a prompt by its ordinal, from 0."""
        ...

    def with_seed(self, seed: int) -> RowOrder:
        """Return the order of the same data with another seed."""
        ...


class PromptOrder:
    """The order of the prompts of one file. Each epoch has every row once.

    >>> order = PromptOrder(num_rows=3, seed=0, shuffle=False)
    >>> [order.row_at(ordinal) for ordinal in (0, 2, 3)]
    [0, 2, 0]
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool, *, source: int | None = None) -> None:
        """`source`: number of the file, if a run has several, whose orders differ."""
        if num_rows < 1:
            raise DataError(f"a sampler needs at least one row, got {num_rows}")
        self.num_rows, self.seed, self.shuffle, self.source = num_rows, seed, shuffle, source
        self._kept: dict[int, NDArray[np.int64]] = {}
        """The order of the epochs used last, by epoch."""

    def row_at(self, ordinal: int) -> int:
        """Return the row of a prompt by its ordinal, from 0."""
        assert ordinal >= 0, f"ordinals count from 0, got {ordinal}"
        epoch, position = divmod(ordinal, self.num_rows)
        return int(self._epoch(epoch)[position])

    def with_seed(self, seed: int) -> PromptOrder:
        """Return the order of the same data with another seed."""
        return PromptOrder(self.num_rows, seed, self.shuffle, source=self.source)

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch in self._kept:
            return self._kept[epoch]
        while len(self._kept) >= KEPT_EPOCHS:
            del self._kept[min(self._kept)]
        self._kept[epoch] = self._permutation(epoch)
        return self._kept[epoch]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_rows, dtype=np.int64)
        # NumPy guarantees RandomState's stream for good; a Generator's may change between releases, and a resumed run
        # would then repeat prompts.
        source = [] if self.source is None else [self.source]
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch, *source]))
        return np.random.RandomState(bits).permutation(self.num_rows).astype(np.int64)


class PromptSampler:
    """Yields row numbers in `range(num_rows)` in an order that is a pure function of the number of rows before.

    >>> sampler = PromptSampler(PromptOrder(num_rows=3, seed=0, shuffle=False))
    >>> sampler.take(4)
    [0, 1, 2, 0]
    >>> sampler.state()
    SamplerState(epoch=1, position=1, seed=0)
    """

    def __init__(self, order: RowOrder) -> None:
        self.order = order
        self.ordinal = 0
        """Ordinal of the next prompt: the number of prompts taken so far, over all epochs."""

    def take(self, n: int) -> list[int]:
        """Return the next `n` row numbers; a batch may cross the end of an epoch."""
        taken = [self.order.row_at(ordinal) for ordinal in range(self.ordinal, self.ordinal + n)]
        self.ordinal += n
        return taken

    def state(self) -> SamplerState:
        """Return the current position."""
        return self.state_at(self.ordinal)

    def state_at(self, ordinal: int) -> SamplerState:
        """Return the state of a sampler that has taken the prompts before `ordinal`."""
        epoch, position = divmod(ordinal, self.order.num_rows)
        return SamplerState(epoch=epoch, position=position, seed=self.order.seed)

    def restore(self, state: SamplerState) -> None:
        """Resume from `state`; its seed replaces that of this sampler.

        Raises:
            DataError: the state refers to more rows than the data has.
        """
        num_rows = self.order.num_rows
        if not 0 <= state.position <= num_rows or state.epoch < 0:
            raise DataError(
                f"the sampler state is at prompt {state.position} of epoch {state.epoch}, but the data has "
                f"{num_rows} rows: it is not the data that the state was saved with"
            )
        self.order = self.order.with_seed(state.seed)
        self.ordinal = state.epoch * num_rows + state.position
