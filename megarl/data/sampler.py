"""Endless, shuffled and resumable sampling of row numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Position of a sampler, counted in rows; sufficient to resume it."""

    epoch: int
    """Number of complete passes over the data."""
    position: int
    """Number of prompts taken from the current epoch."""
    seed: int


class PromptSampler:
    """Yields row numbers in `range(num_rows)`, each once per epoch, in an order that depends only on (seed, epoch).

    >>> sampler = PromptSampler(num_rows=3, seed=0, shuffle=False)
    >>> sampler.take(4)
    [0, 1, 2, 0]
    >>> sampler.state()
    SamplerState(epoch=1, position=1, seed=0)
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise DataError(f"a sampler needs at least one row, got {num_rows}")
        self.num_rows = num_rows
        self.shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def take(self, n: int) -> list[int]:
        """Return the next `n` row numbers; a batch may cross the end of an epoch."""
        taken: list[int] = []
        while len(taken) < n:
            if self._position == self.num_rows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            some = self._order[self._position : self._position + n - len(taken)]
            self._position += len(some)
            taken += some.tolist()
        return taken

    def state(self) -> SamplerState:
        """Return the current position."""
        return SamplerState(epoch=self._epoch, position=self._position, seed=self._seed)

    def restore(self, state: SamplerState) -> None:
        """Resume from `state`; its seed replaces that of this sampler.

        Raises:
            DataError: the state refers to more rows than the data has.
        """
        if not 0 <= state.position <= self.num_rows or state.epoch < 0:
            raise DataError(
                f"the sampler state is at prompt {state.position} of epoch {state.epoch}, but the data has "
                f"{self.num_rows} rows: it is not the data that the state was saved with"
            )
        self._seed, self._epoch, self._position = state.seed, state.epoch, state.position
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.num_rows, dtype=np.int64)
        # NumPy guarantees RandomState's stream for good; a Generator's may change between releases, and a resumed run
        # would then repeat prompts.
        bits = np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch]))
        return np.random.RandomState(bits).permutation(self.num_rows).astype(np.int64)
