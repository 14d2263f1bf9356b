"""Load preference pairs from a data file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.batch.trajectory import MAX_REWARD, Trajectory
from megarl.config.data import DataConfig, FieldsConfig
from megarl.data.chat_template import PromptTemplate
from megarl.data.prompts import OverlongFilter, batch_rows
from megarl.data.rows import Row, read_rows, track
from megarl.errors import DataError


def load_demonstrations(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, path: str | None = None
) -> list[Trajectory]:
    """Return each row of `path` (default: `data.path`) as prompt + response + eos, with its index as `group_id`.

    A response that ends in eos gets no other.

    Prompt and response are tokenized separately, so that the prompt's tokens are those that generation starts from.

    Raises:
        DataError: a row lacks prompt or response, one of them has no tokens, or both have more than `max_tokens` while
            `data.overlong_prompts` is `error` (the message names file:line); or no row is left.
    """
    file = Path(path or config.file)
    template = PromptTemplate(config, tokenizer, config.template_date)
    overlong = OverlongFilter(file, config.overlong_prompts, max_tokens, "demonstration", "the context length")
    demonstrations: list[Trajectory] = []
    for rows in track(batch_rows(read_rows(file)), f"tokenizing {file.name}"):
        prompts = template.tokenize_rows(rows)
        texts = [_read_response(row, config.fields.response) for row in rows]
        responses = template.tokenize_responses(rows, texts, "response")
        for row, prompt, response in zip(rows, prompts, responses, strict=True):
            if overlong.keep(row, len(prompt) + len(response)):
                demonstrations.append(make_supervised_trajectory(row, prompt, response, group_id=len(demonstrations)))
    overlong.report_dropped(num_kept=len(demonstrations))
    return demonstrations


def make_supervised_trajectory(row: Row, prompt: list[int], response: list[int], *, group_id: int) -> Trajectory:
    """Return prompt and response as a trajectory whose response counts as sampled by the policy."""
    num_tokens = len(prompt) + len(response)
    loss_mask = np.zeros(num_tokens, dtype=np.bool_)
    loss_mask[len(prompt) :] = True
    return Trajectory(
        prompt_id=row.prompt_id,
        group_id=group_id,
        token_ids=np.array(prompt + response, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, -1, dtype=np.int32),
    )


def _read_response(row: Row, field: str) -> str:
    if field not in row.fields:
        has = ", ".join(repr(name) for name in row.fields) or "no fields"
        raise DataError(
            f"{row.where}: a demonstration needs field {field!r} (data.fields.response), the text to train on; "
            f"the row has {has}"
        )
    return row.response(field, "data.fields.response")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """A chosen and a rejected answer to one prompt."""

    chosen: Trajectory
    rejected: Trajectory

    margin: float = 0.0
    """Minimum difference of their scores."""

    safe: tuple[bool, bool] | None = None
    """Whether the chosen and the rejected answer are safe; None if unknown."""


def load_preferences(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    path: str | None = None,
    safety: bool = False,
) -> list[PreferencePair]:
    """Return each row of `path` (default: `data.path`) as two trajectories, prompt + answer + eos.

    The row's index is their `group_id`. Prompt and answers are tokenized separately, so that the prompt's tokens are
    those that generation starts from.

    Args:
        safety: also read the safety labels, if the rows have them.

    Raises:
        DataError: a row lacks prompt or answers, one of them has no tokens, the answers are equal, a margin or safety
            label is invalid, or a sequence has more than `max_tokens` tokens while `data.overlong_prompts` is `error`
            (the message names file:line); or no row is left.
    """
    file = Path(path or config.file)
    template = PromptTemplate(config, tokenizer, config.template_date)
    overlong = OverlongFilter(file, config.overlong_prompts, max_tokens, "longer sequence", "the context length")
    fields = config.fields
    pairs: list[PreferencePair] = []
    first: tuple[Row, bool] | None = None
    for rows in track(batch_rows(read_rows(file)), f"tokenizing {file.name}"):
        prompts = template.tokenize_rows(rows)
        answers = [_read_answers(row, fields) for row in rows]
        chosen = template.tokenize_responses(rows, [better for better, _ in answers], "chosen")
        rejected = template.tokenize_responses(rows, [worse for _, worse in answers], "rejected")
        for row, prompt, better, worse in zip(rows, prompts, chosen, rejected, strict=True):
            if better == worse:
                raise DataError(_equal_answers_message(row, fields))
            margin, safe = _read_margin(row, fields.margin), _read_safety(row, fields) if safety else None
            first = first or (row, safe is not None)
            if first[1] != (safe is not None):
                raise DataError(_mixed_labels_message(row, first[0], fields))
            if overlong.keep(row, len(prompt) + max(len(better), len(worse))):
                pairs.append(
                    PreferencePair(
                        chosen=make_supervised_trajectory(row, prompt, better, group_id=len(pairs)),
                        rejected=make_supervised_trajectory(row, prompt, worse, group_id=len(pairs)),
                        margin=margin,
                        safe=safe,
                    )
                )
    overlong.report_dropped(num_kept=len(pairs))
    return pairs


def _read_answers(row: Row, fields: FieldsConfig) -> tuple[str, str]:
    """Return the chosen and the rejected answer."""
    chosen = row.response(fields.chosen, "data.fields.chosen")
    rejected = row.response(fields.rejected, "data.fields.rejected")
    if chosen == rejected:
        raise DataError(_equal_answers_message(row, fields))
    return chosen, rejected


def _equal_answers_message(row: Row, fields: FieldsConfig) -> str:
    return (
        f"{row.where}: fields {fields.chosen!r} (data.fields.chosen) and {fields.rejected!r} (data.fields.rejected) "
        "hold the same answer; a preference needs two"
    )


def _read_margin(row: Row, field: str) -> float:
    value = row.fields.get(field)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_REWARD:
        raise DataError(
            f"{row.where}: field {field!r} (data.fields.margin) needs a number from 0 to {MAX_REWARD:g}, got {value!r}"
        )
    return float(value)


def _read_safety(row: Row, fields: FieldsConfig) -> tuple[bool, bool] | None:
    """Return the safety labels of the chosen and the rejected answer; None if the row has none."""
    names = {"data.fields.chosen_safe": fields.chosen_safe, "data.fields.rejected_safe": fields.rejected_safe}
    values = {key: row.fields.get(field) for key, field in names.items()}
    if all(value is None for value in values.values()):
        return None
    for key, value in values.items():
        if not isinstance(value, bool):
            got = "nothing, but the other answer has a label" if value is None else repr(value)
            raise DataError(f"{row.where}: field {names[key]!r} ({key}) needs true or false, got {got}")
    chosen, rejected = values.values()
    return bool(chosen), bool(rejected)


def _mixed_labels_message(row: Row, first: Row, fields: FieldsConfig) -> str:
    has_labels = _read_safety(row, fields) is not None
    return (
        f"{row.where}: the row has {'safety' if has_labels else 'no safety'} labels (data.fields.chosen_safe, "
        f"data.fields.rejected_safe), unlike {first.where}; either all rows of a file need them, or none"
    )
