"""A data file -> pairs of answers, one of them preferred."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megarl.batch.trajectory import Trajectory
from megarl.config.data import DataConfig, FieldsConfig
from megarl.data.chat_template import PromptTemplate
from megarl.data.demonstrations import answered
from megarl.data.progress_bar import track
from megarl.data.prompts import OverlongRows, in_batches
from megarl.data.rows import Row, read_rows
from megarl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two answers to one prompt."""

    chosen: Trajectory
    rejected: Trajectory

    margin: float = 0.0
    """By how much their scores are to differ at least."""

    safe: tuple[bool, bool] | None = None
    """Whether the chosen answer is safe, and whether the rejected one is; None: not known."""


def load_preferences(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    path: str | None = None,
    safety: bool = False,
) -> list[PreferencePair]:
    """Every row of `path` (default: `data.path`) as prompt + answer + eos, twice; `group_id` counts the rows.

    Prompt and answers are tokenized apart: the prompt's tokens are those that generation will start from.

    Args:
        safety: read which answers are safe, where the rows say so.

    Raises:
        DataError: names file:line; a row without prompt or answers, whose answers are the same, whose margin or safety
            cannot be read, or in which either answer makes more than `max_tokens` tokens where `data.overlong_prompts`
            is `error`; or no row left.
    """
    file = Path(path or config.path)
    template = PromptTemplate(config, tokenizer)
    overlong = OverlongRows(file, config.overlong_prompts, max_tokens, "longer sequence", "the context length")
    eos, fields = tokenizer.eos_token_id, config.fields
    pairs: list[PreferencePair] = []
    first: tuple[Row, bool] | None = None
    for rows in track(in_batches(read_rows(file)), f"tokenizing {file.name}"):
        prompts = template.tokenize([template.render(row) for row in rows])
        answers = [_answers(row, fields) for row in rows]
        chosen = template.tokenize_continuations([better for better, _ in answers])
        rejected = template.tokenize_continuations([worse for _, worse in answers])
        for row, prompt, better, worse in zip(rows, prompts, chosen, rejected, strict=True):
            if not prompt:
                raise DataError(f"{row.where}: field {fields.prompt!r} (data.fields.prompt) holds no tokens")
            margin, safe = _margin(row, fields.margin), _safety(row, fields) if safety else None
            first = first or (row, safe is not None)
            if first[1] != (safe is not None):
                raise DataError(_mixed(row, first[0], fields))
            if overlong.keeps(row, len(prompt) + max(len(better), len(worse)) + 1):
                pairs.append(
                    PreferencePair(
                        chosen=answered(row, prompt, [*better, eos], group_id=len(pairs)),
                        rejected=answered(row, prompt, [*worse, eos], group_id=len(pairs)),
                        margin=margin,
                        safe=safe,
                    )
                )
    overlong.close(kept=len(pairs))
    return pairs


def _answers(row: Row, fields: FieldsConfig) -> tuple[str, str]:
    """The better and the worse one."""
    found = []
    for field, key in ((fields.chosen, "data.fields.chosen"), (fields.rejected, "data.fields.rejected")):
        text = row.text(field, key)
        if not text:
            raise DataError(f"{row.where}: field {field!r} ({key}) is empty")
        found.append(text)
    chosen, rejected = found
    if chosen == rejected:
        raise DataError(
            f"{row.where}: fields {fields.chosen!r} (data.fields.chosen) and {fields.rejected!r} "
            f"(data.fields.rejected) hold the same answer; a preference needs two"
        )
    return chosen, rejected


def _margin(row: Row, field: str) -> float:
    value = row.fields.get(field)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise DataError(
            f"{row.where}: field {field!r} (data.fields.margin) needs a number of at least 0, got {value!r}"
        )
    return float(value)


def _safety(row: Row, fields: FieldsConfig) -> tuple[bool, bool] | None:
    """Of both answers; None where the row says nothing."""
    names = {"data.fields.chosen_safe": fields.chosen_safe, "data.fields.rejected_safe": fields.rejected_safe}
    values = {key: row.fields.get(field) for key, field in names.items()}
    if all(value is None for value in values.values()):
        return None
    for key, value in values.items():
        if not isinstance(value, bool):
            got = "nothing, though the other answer has one" if value is None else repr(value)
            raise DataError(f"{row.where}: field {names[key]!r} ({key}) needs true or false, got {got}")
    chosen, rejected = values.values()
    return bool(chosen), bool(rejected)


def _mixed(row: Row, first: Row, fields: FieldsConfig) -> str:
    labelled = _safety(row, fields) is not None
    return (
        f"{row.where}: says {'which' if labelled else 'nothing about which'} answers are safe "
        f"(data.fields.chosen_safe, data.fields.rejected_safe), unlike {first.where}; all rows of a file need to, or "
        "none"
    )
