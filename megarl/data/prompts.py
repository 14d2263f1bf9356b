"""Load and tokenize the prompts of a data file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.batch.trajectory import Prompt
from megarl.config.data import Source
from megarl.data.chat_template import PromptTemplate
from megarl.data.rows import ExplicitFields, Row, read_rows, track
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from megarl.config import RunConfig
from megarl.errors import ConfigError


class StoredPrompts(Sequence[Prompt]):
    """A sequence of prompts that are read from a file at each access, in any order.

    The file has no name: no other process can read or change it, and it ends with the last reference to it. Changes of
    the data file have no effect on prompts that were stored.
    """

    def __init__(self, file: BinaryIO, starts_N: NDArray[np.int64], ends_N: NDArray[np.int64]) -> None:
        """`starts_N`, `ends_N`: offsets of each prompt in the file."""
        self._file, self._starts_N, self._ends_N = file, starts_N, ends_N

    @classmethod
    def store(cls, prompts: Iterable[Prompt], folder: Path | None = None) -> StoredPrompts:
        """Write the prompts to a new file.

        Args:
            folder: of the file; created if missing. None: the system's folder for temporary files.

        Raises:
            DataError: the file cannot be written.
        """
        ends = [0]
        with _named_errors(folder):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed with the last reference
        for prompt in prompts:
            stored = pickle.dumps(prompt, pickle.HIGHEST_PROTOCOL)
            with _named_errors(folder):
                ends.append(ends[-1] + file.write(stored))
        with _named_errors(folder):
            file.flush()
        bounds = np.array(ends, np.int64)
        return cls(file, bounds[:-1], bounds[1:])

    def __len__(self) -> int:
        return len(self._starts_N)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> StoredPrompts: ...

    def __getitem__(self, index: int | slice) -> Prompt | StoredPrompts:
        """Return one prompt, or those of a slice, which share the file."""
        if isinstance(index, slice):
            return StoredPrompts(self._file, self._starts_N[index], self._ends_N[index])
        start, end = int(self._starts_N[index]), int(self._ends_N[index])
        prompt: Prompt = pickle.loads(os.pread(self._file.fileno(), end - start, start))  # noqa: S301  # its own file
        return prompt


@contextmanager
def _named_errors(folder: Path | None) -> Iterator[None]:
    """Raise errors of the file as `DataError`s that name its folder."""
    try:
        yield
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise DataError(f"{where}: tokenized prompts cannot be stored: {error.strerror}") from error


def resolve_max_prompt_tokens(config: RunConfig, hf_config: Mapping[str, Any], source: Source) -> int:
    """Return the maximum prompt length of a source in tokens.

    This is its `max_prompt_tokens` if set, else the context length minus `rollout.max_new_tokens`.

    Args:
        hf_config: content of the model's config.json.

    Raises:
        ConfigError: prompt and completion together exceed the model's context.
    """
    context, completion = int(hf_config["max_position_embeddings"]), config.rollout.max_new_tokens
    prompt, key = source.config.max_prompt_tokens, f"{source.key}.max_prompt_tokens"
    if prompt is None:
        if completion >= context:
            raise ConfigError(
                f"rollout.max_new_tokens: needs to leave room for a prompt in the model's max_position_embeddings = "
                f"{context}, got {completion}, {context} - {completion} = {context - completion}"
            )
        return context - completion
    if prompt + completion > context:
        raise ConfigError(
            f"{key}: prompt and completion need to fit the model's max_position_embeddings = "
            f"{context}, got {key} + rollout.max_new_tokens = {prompt} + {completion} = "
            f"{prompt + completion}"
        )
    return prompt


logger = logging.getLogger(__name__)

BATCH_ROWS = 1024
"""Rows tokenized per call, in parallel by the tokenizer's threads."""


def load_prompts(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    path: str,
    max_prompt_tokens: int,
    folder: Path | None = None,
) -> StoredPrompts:
    """Return the prompts that `tokenize_prompts` yields, stored in a file in `folder`; raises as it does."""
    prompts = tokenize_prompts(source, tokenizer, path=path, max_prompt_tokens=max_prompt_tokens)
    return StoredPrompts.store(prompts, folder)


def tokenize_prompts(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    path: str,
    max_prompt_tokens: int,
    is_kept: Callable[[Row], bool] | None = None,
) -> Iterator[Prompt]:
    """Yield the tokenized prompts of `path` in file order, each of at most `max_prompt_tokens` tokens.

    Rows for which `is_kept` returns false are left out.

    Raises:
        DataError: a row cannot be read or rendered, a prompt is empty, or a prompt is overlong while
            `data.overlong_prompts` is `error` (the message names file:line); or no prompt is left.
    """
    config, key = source.config, source.key
    template = PromptTemplate(config, tokenizer, source.day, key=key)
    limit_key = f"{key}.max_prompt_tokens"
    overlong = OverlongFilter(Path(path), config.overlong_prompts, max_prompt_tokens, "prompt", limit_key)
    terms = None if config.reward_terms is None else tuple(config.reward_terms)
    explicit, num_kept = ExplicitFields(config.fields, key), 0
    kept_rows = read_rows(path) if is_kept is None else filter(is_kept, read_rows(path))
    for rows in track(batch_rows(kept_rows), f"tokenizing {Path(path).name}"):
        texts = [template.render(row) for row in rows]
        for row, text, ids in zip(rows, texts, template.tokenize(texts, rows), strict=True):
            explicit.see(row)
            if not ids:
                field = template.reader.prompt_field(row)
                raise DataError(f"{row.where}: field {field!r} ({key}.fields.prompt) holds no tokens")
            if overlong.keep(row, len(ids)):
                num_kept += 1
                answers = template.reader.answers(row)
                yield Prompt(
                    prompt_id=f"{source.name}/{row.prompt_id}" if source.name else row.prompt_id,
                    text=text,
                    token_ids=tuple(ids),
                    row=dict(row.fields),
                    answer=answers[0] if answers else None,
                    other_answers=answers[1:],
                    source=source.name,
                    reward_terms=terms,
                    max_new_tokens=config.max_new_tokens,
                )
    explicit.require_found(Path(path))
    overlong.report_dropped(num_kept=num_kept)


def batch_rows(rows: Iterable[Row], size: int = BATCH_ROWS) -> Iterator[list[Row]]:
    """Yield `rows` in lists of `size`; the last one may be shorter."""
    stream = iter(rows)
    while batch := list(islice(stream, size)):
        yield batch


class OverlongFilter:
    """Handles rows with too many tokens: raises at once, or drops and counts them."""

    def __init__(self, path: Path, policy: Literal["error", "drop"], limit: int, what: str, key: str) -> None:
        self._path, self._policy, self._limit, self._what, self._key = path, policy, limit, what, key
        self._num_dropped = 0

    def keep(self, row: Row, num_tokens: int) -> bool:
        """Return whether a row of `num_tokens` is kept.

        Raises:
            DataError: the row is too long and the policy is `error`.
        """
        if num_tokens <= self._limit:
            return True
        if self._policy == "error":
            raise DataError(
                f"{row.where}: the {self._what} has {num_tokens} tokens, {num_tokens - self._limit} more than "
                f"{self._key} = {self._limit}; data.overlong_prompts: drop removes such rows"
            )
        self._num_dropped += 1
        return False

    def report_dropped(self, *, num_kept: int) -> None:
        """Log how many rows were dropped.

        Raises:
            DataError: all rows were dropped.
        """
        if not num_kept:
            raise DataError(
                f"{self._path}: no row is left: all {self._num_dropped} {self._what}s are longer than "
                f"{self._key} = {self._limit} tokens"
            )
        if self._num_dropped:
            logger.warning(
                "%s: dropped %d of %d rows: %s longer than %s = %d tokens",
                self._path,
                self._num_dropped,
                num_kept + self._num_dropped,
                self._what,
                self._key,
                self._limit,
            )
