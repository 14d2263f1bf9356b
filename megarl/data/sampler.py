"""An endless, shuffled and resumable stream of row numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Where a sampler stands, counted in rows: all that is needed to continue it."""

    epoch: int
    """Complete passes over the data."""
    position: int
    """Prompts already taken of this epoch."""
    seed: int


class PromptSampler:
    """Row numbers in `range(num_rows)`, each once an epoch, in an order that only (seed, epoch) decides.

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
        """The next `n` row numbers; a batch may reach over the end of an epoch."""
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
        """Where this sampler stands."""
        return SamplerState(epoch=self._epoch, position=self._position, seed=self._seed)

    def restore(self, state: SamplerState) -> None:
        """Continue where `state` was taken; its seed replaces this sampler's.

        Raises:
            DataError: the state is of more rows than there are.
        """
        if not 0 <= state.position <= self.num_rows or state.epoch < 0:
            raise DataError(
                f"the sampler's state stands at prompt {state.position} of epoch {state.epoch}, but the data has "
                f"{self.num_rows} rows: it is not the data that the state was saved with"
            )
        self._seed, self._epoch, self._position = state.seed, state.epoch, state.position
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.num_rows, dtype=np.int64)
        # NumPy freezes RandomState's stream for good; a Generator's may change between releases, and a resumed run
        # would then see prompts twice.
        bits = np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch]))
        return np.random.RandomState(bits).permutation(self.num_rows).astype(np.int64)
