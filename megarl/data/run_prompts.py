"""The prompts of a run: those of all sources, and the order in which they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.config.data import Source
from megarl.data.mixture import MixtureOrder
from megarl.data.prompt_budget import resolve_max_prompt_tokens
from megarl.data.prompts import tokenize_prompts
from megarl.data.rows import Row
from megarl.data.sampler import PromptOrder, RowOrder
from megarl.data.stored_prompts import StoredPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
