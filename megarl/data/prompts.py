"""A data file -> tokenized prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from megarl.batch.trajectory import Prompt
from megarl.config.data import DataConfig
from megarl.data.chat_template import PromptTemplate
from megarl.data.progress_bar import track
from megarl.data.rows import Row, read_rows
from megarl.errors import DataError

logger = logging.getLogger(__name__)

BATCH_ROWS = 1024
"""Rows tokenized in one call, which the tokenizer spreads over its threads."""


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, path: str, max_prompt_tokens: int
) -> list[Prompt]:
    """Every prompt of `path` in the file's order, tokenized, none longer than `max_prompt_tokens`.

    Raises:
        DataError: names file:line; a row that cannot be read or rendered, an empty prompt, an overlong one where
            `data.overlong_prompts` is `error`, or no prompt left.
    """
    template = PromptTemplate(config, tokenizer)
    overlong = OverlongRows(Path(path), config.overlong_prompts, max_prompt_tokens, "prompt", "data.max_prompt_tokens")
    prompts: list[Prompt] = []
    for rows in track(in_batches(read_rows(path)), f"tokenizing {Path(path).name}"):
        texts = [template.render(row) for row in rows]
        for row, text, ids in zip(rows, texts, template.tokenize(texts), strict=True):
            if not ids:
                raise DataError(f"{row.where}: field {config.fields.prompt!r} (data.fields.prompt) holds no tokens")
            if overlong.keeps(row, len(ids)):
                answer = _answer(row.fields.get(config.fields.answer))
                prompts.append(
                    Prompt(
                        prompt_id=row.prompt_id, text=text, token_ids=tuple(ids), row=dict(row.fields), answer=answer
                    )
                )
    overlong.close(kept=len(prompts))
    return prompts


def in_batches(rows: Iterable[Row], size: int = BATCH_ROWS) -> Iterator[list[Row]]:
    """`rows` in lists of `size`, the last one shorter."""
    stream = iter(rows)
    while batch := list(islice(stream, size)):
        yield batch


class OverlongRows:
    """What becomes of rows with too many tokens: an error at once, or dropped and counted."""

    def __init__(self, path: Path, policy: Literal["error", "drop"], limit: int, what: str, key: str) -> None:
        self._path, self._policy, self._limit, self._what, self._key = path, policy, limit, what, key
        self._num_dropped = 0

    def keeps(self, row: Row, num_tokens: int) -> bool:
        """Whether a row of `num_tokens` stays.

        Raises:
            DataError: it is too long and the policy is `error`.
        """
        if num_tokens <= self._limit:
            return True
        if self._policy == "error":
            raise DataError(
                f"{row.where}: the {self._what} has {num_tokens} tokens, {num_tokens - self._limit} more than "
                f"{self._key} = {self._limit}; data.overlong_prompts: drop leaves such rows out"
            )
        self._num_dropped += 1
        return False

    def close(self, *, kept: int) -> None:
        """Log how many rows were dropped.

        Raises:
            DataError: all were.
        """
        if not kept:
            raise DataError(
                f"{self._path}: no row is left: all {self._num_dropped} {self._what}s are longer than "
                f"{self._key} = {self._limit} tokens"
            )
        if self._num_dropped:
            logger.warning(
                "%s: dropped %d of %d rows: %s longer than %s = %d tokens",
                self._path,
                self._num_dropped,
                kept + self._num_dropped,
                self._what,
                self._key,
                self._limit,
            )


def _answer(value: Any) -> str | None:
    """The reference as text. Structured ones stay in the row, where reward functions find them."""
    match value:
        case str():
            return value
        case int() | float():
            return str(value)
        case _:
            return None
