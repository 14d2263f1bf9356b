"""Endless, shuffled and resumable sampling of row numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, islice
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.config.data import Source
from megarl.data.prompts import StoredPrompts, resolve_max_prompt_tokens, tokenize_prompts
from megarl.data.rows import Row
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    Examples:
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

    Examples:
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


MAX_PERIOD = 10_000
"""Largest number of prompts after which the sequence of sources repeats: ratios have four decimals."""


class MixtureOrder:
    """The order of prompts from several sources: sources alternate by their ratios, each has its own order of rows.

    The sequence of sources has the period P, the common denominator of the ratios. Within a period each prompt comes
    from the source that is furthest behind its ratio (the largest remainder), so that after any number n of prompts
    source j has had n * ratio_j of them, rounded up or down or one off. Rows are numbered over all sources, in their
    order.

    Examples:
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

    Examples:
        >>> source_weights([0.5, 0.3, 0.2])
        [5, 3, 2]
    """
    exact = [Fraction(round(ratio * MAX_PERIOD), MAX_PERIOD) for ratio in ratios]
    denominator = lcm(*(each.denominator for each in exact))
    return [int(each * denominator) for each in exact]


RowFilter = Callable[[Source], Callable[[Row], bool] | None]
"""Source -> function that tells whether a row is kept; None: all rows are."""


def keep_all(source: Source) -> None:
    """Return the filter that keeps all rows of a source."""


@dataclass(frozen=True, kw_only=True)
class RunPrompts:
    """The tokenized prompts of a run."""

    training: Sequence[Prompt]
    """The training prompts of all sources, source after source."""
    order: RowOrder
    """Order in which they are taken."""
    held_out: Sequence[Prompt] = ()
    """The held-out prompts of all sources, source after source."""


def load_run_prompts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    hf_config: Mapping[str, Any],
    folder: Path | None,
    row_filter: RowFilter = keep_all,
) -> RunPrompts:
    """Return the prompts of a run.

    Args:
        hf_config: content of the model's config.json.
        folder: folder of the file that stores the prompts; None: the system's folder for temporary files.
        row_filter: source -> function that tells whether a row is kept, or None for all rows.

    Raises:
        ConfigError: a prompt and its completion may exceed the model's context.
        DataError: as `tokenize_prompts`, or the prompts cannot be stored.
    """
    sources, seed, shuffle = config.data.resolved_sources, config.seed, config.data.shuffle
    sizes = [0] * len(sources)

    def read(number: int, source: Source) -> Iterator[Prompt]:
        limit = resolve_max_prompt_tokens(config, hf_config, source)
        path, is_kept = source.config.path, row_filter(source)
        for prompt in tokenize_prompts(source, tokenizer, path=path, max_prompt_tokens=limit, is_kept=is_kept):
            sizes[number] += 1
            yield prompt

    training = StoredPrompts.store(chain.from_iterable(read(*each) for each in enumerate(sources)), folder)
    order: RowOrder
    if len(sources) == 1 and not sources[0].name:
        order = PromptOrder(len(training), seed, shuffle)
    else:
        order = MixtureOrder(sizes, [source.config.ratio for source in sources], seed, shuffle)
    return RunPrompts(
        training=training, order=order, held_out=load_held_out(config, tokenizer, hf_config, folder, row_filter)
    )


def load_held_out(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    hf_config: Mapping[str, Any],
    folder: Path | None,
    row_filter: RowFilter = keep_all,
) -> Sequence[Prompt]:
    """Return the held-out prompts of all sources, which may be none; arguments and errors as for `load_run_prompts`."""

    def read(source: Source, path: str) -> Iterator[Prompt]:
        limit = resolve_max_prompt_tokens(config, hf_config, source)
        prompts = tokenize_prompts(source, tokenizer, path=path, max_prompt_tokens=limit, is_kept=row_filter(source))
        return islice(prompts, source.config.eval_size)

    sources = [(source, source.config.eval_path) for source in config.data.resolved_sources]
    found = [read(source, path) for source, path in sources if path is not None]
    return StoredPrompts.store(chain.from_iterable(found), folder) if found else ()
