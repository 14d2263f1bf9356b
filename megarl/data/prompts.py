"""Load and tokenize the prompts of a data file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.batch.trajectory import Prompt
from megarl.config.data import Source
from megarl.data.chat_template import PromptTemplate
from megarl.data.progress_bar import track
from megarl.data.rows import Row, read_rows
from megarl.data.stored_prompts import StoredPrompts
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    num_kept = 0
    kept_rows = read_rows(path) if is_kept is None else filter(is_kept, read_rows(path))
    for rows in track(batch_rows(kept_rows), f"tokenizing {Path(path).name}"):
        texts = [template.render(row) for row in rows]
        for row, text, ids in zip(rows, texts, template.tokenize(texts, rows), strict=True):
            if not ids:
                raise DataError(f"{row.where}: field {config.fields.prompt!r} ({key}.fields.prompt) holds no tokens")
            if overlong.keep(row, len(ids)):
                num_kept += 1
                answer = _answer(row.fields.get(config.fields.answer))
                yield Prompt(
                    prompt_id=f"{source.name}/{row.prompt_id}" if source.name else row.prompt_id,
                    text=text,
                    token_ids=tuple(ids),
                    row=dict(row.fields),
                    answer=answer,
                    source=source.name,
                    reward_terms=terms,
                    max_new_tokens=config.max_new_tokens,
                )
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


def _answer(value: Any) -> str | None:
    """Return the reference answer as text; None if it is missing, as a blank text, NaN and infinity are.

    Booleans, decimals, bytes, dates and structured answers have none either: reward functions read them from the row.
    """
    match value:
        case bool():
            return None
        case str():
            return value if value.strip() else None
        case int():
            return str(value)
        case float():
            return str(value) if math.isfinite(value) else None
        case _:
            return None
