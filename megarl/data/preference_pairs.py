"""Load preference pairs from a data file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.batch.trajectory import MAX_REWARD, Trajectory
from megarl.config.data import DataConfig, FieldsConfig
from megarl.data.assistant_turns import Conversation
from megarl.data.chat_template import PromptTemplate, as_question
from megarl.data.conversations import MessageError, Messages, read_hh, split_hh, split_pair, without_weights
from megarl.data.demonstrations import ExampleTokenizer, TextExample, make_trajectory
from megarl.data.prompts import OverlongFilter, batch_rows
from megarl.data.rows import ExplicitFields, Row, read_rows, refuse_media, track
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


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
    """Return the pairs that `tokenize_preferences` yields for the rows of `path`; raises as it does."""
    rows = read_rows(path or config.file)
    return [*tokenize_preferences(config, tokenizer, rows, max_tokens=max_tokens, path=path, safety=safety)]


def tokenize_preferences(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Row],
    *,
    max_tokens: int,
    path: str | None = None,
    safety: bool = False,
) -> Iterator[PreferencePair]:
    """Yield the pairs of rows in order, with the pair's index as `group_id`.

    Both answers follow the same tokens of the prompt, which are those that generation starts from. Rows whose answers
    are rated as equal are dropped and counted.

    Args:
        path: file of the rows, for messages; None: `data.path`.
        safety: also read the safety labels, if the rows have them.

    Raises:
        DataError: a row is no pair, one of its texts has no tokens, the answers are equal, a margin or safety label is
            invalid, or a sequence has more than `max_tokens` tokens while `data.overlong_prompts` is `error` (the
            message names file:line); or no row is left.
    """
    file = Path(path or config.file)
    template = PromptTemplate(config, tokenizer, config.template_date)
    reader, examples = PairReader(config, template), ExampleTokenizer(template)
    overlong = OverlongFilter(file, config.overlong_prompts, max_tokens, "longer sequence", "the context length")
    fields = config.fields
    first: tuple[Row, bool] | None = None
    explicit = ExplicitFields(fields, "data")
    num_pairs = num_ties = 0
    for batch in track(batch_rows(rows), f"tokenizing {file.name}"):
        for row in batch:
            explicit.see(row)
        read = [(row, pair) for row in batch if (pair := reader.read(row)) is not None]
        num_ties += len(batch) - len(read)
        answers = iter(examples.tokenize([(row, answer) for row, pair in read for answer in pair]))
        for (row, _), (better,), (worse,) in zip(read, answers, answers, strict=True):
            if np.array_equal(better.ids, worse.ids):
                raise DataError(_equal_answers_message(row, fields))
            margin, safe = read_margin(row, fields.margin), read_safety(row, fields) if safety else None
            first = first or (row, safe is not None)
            if first[1] != (safe is not None):
                raise DataError(_mixed_labels_message(row, first[0], fields))
            if overlong.keep(row, max(len(better.ids), len(worse.ids))):
                chosen, rejected = (make_trajectory(row, each, group_id=num_pairs) for each in (better, worse))
                yield PreferencePair(chosen=chosen, rejected=rejected, margin=margin, safe=safe)
                num_pairs += 1
    explicit.require_found(file)
    if num_ties:
        logger.warning("%s: dropped %d rows whose answers are rated as equal", file, num_ties)
    if not num_pairs and num_ties and first is None:
        raise DataError(f"{file}: no row is left: the answers of all {num_ties} rows are rated as equal")
    overlong.report_dropped(num_kept=num_pairs)


Pair = tuple[TextExample, TextExample] | tuple[Conversation, Conversation]
"""The chosen and the rejected answer to a prompt."""


class PairReader:
    """Reads rows as pairs of texts or conversations.

    | fields                                             | prompt                                             |
    |----------------------------------------------------|----------------------------------------------------|
    | `prompt`, `chosen`, `rejected`: texts              | `prompt`                                           |
    | `chosen`, `rejected`: messages that follow `prompt`| `prompt`                                           |
    | `chosen`, `rejected`: conversations                | the messages that both begin with                  |
    | `chosen`, `rejected`: HH-RLHF's texts              | the text up to the last `Assistant:`               |
    | `context`, `response1`, `response2`, `overall_preference` (HelpSteer3) | `context`                      |
    | `context`, two `completions` with a `rank` (NeMo-RL) | `context`                                        |
    """

    def __init__(self, config: DataConfig, template: PromptTemplate) -> None:
        self._fields, self._template = config.fields, template

    def read(self, row: Row) -> Pair | None:
        """Return the pair of a row; None if its answers are rated as equal.

        Raises:
            DataError: it has none; the message names file:line.
        """
        refuse_media(row)
        names, has = self._fields, row.fields
        if "overall_preference" in has and names.chosen not in has:
            return self._rated(row)
        if "completions" in has and "context" in has and names.chosen not in has:
            return self._ranked(row)
        chosen, rejected = (
            row.value(names.chosen, "data.fields.chosen"),
            row.value(names.rejected, "data.fields.rejected"),
        )
        if isinstance(chosen, list | dict) and isinstance(rejected, list | dict):
            return self._conversations(row, chosen, rejected)
        if isinstance(chosen, str) and isinstance(rejected, str) and names.prompt not in has:
            heads = split_hh(chosen), split_hh(rejected)
            if heads[0] is not None and heads[1] is not None:
                return self._hh(row, chosen, rejected, heads[0], heads[1])
        return self._texts(row)

    def _texts(self, row: Row) -> Pair:
        names = self._fields
        chosen = row.response(names.chosen, "data.fields.chosen")
        rejected = row.response(names.rejected, "data.fields.rejected")
        if chosen == rejected:
            raise DataError(_equal_answers_message(row, names))
        prompt = self._template.render(row)
        asked = f"field {names.prompt!r} (data.fields.prompt)"
        return (
            TextExample(prompt, chosen, (asked, f"field {names.chosen!r} (data.fields.chosen)")),
            TextExample(prompt, rejected, (asked, f"field {names.rejected!r} (data.fields.rejected)")),
        )

    def _conversations(self, row: Row, chosen: object, rejected: object) -> Pair:
        names = self._fields
        better, worse = (
            self._template.messages(row, [value] if isinstance(value, dict) else value, field, f"data.fields.{key}")
            for value, field, key in ((chosen, names.chosen, "chosen"), (rejected, names.rejected, "rejected"))
        )
        prompt = self._template.prompt_messages(row) if row.find(names.prompt) is not None else []
        if all(answer[0]["role"] == "assistant" for answer in (better, worse)):
            better, worse = [*prompt, *better], [*prompt, *worse]
        return self._split(row, better, worse)

    def _split(self, row: Row, better: Messages, worse: Messages) -> tuple[Conversation, Conversation]:
        try:
            prompt, chosen, rejected = split_pair(without_weights(better), without_weights(worse))
        except MessageError as e:
            fields = (
                f"{self._fields.chosen!r} (data.fields.chosen) and {self._fields.rejected!r} (data.fields.rejected)"
            )
            raise DataError(f"{row.where}: fields {fields} {e}") from e
        before, tools = self._template.with_system_prompt(row, prompt), self._template.tools(row)
        return (
            Conversation(messages=[*before, chosen], trained=[len(before)], tools=tools),
            Conversation(messages=[*before, rejected], trained=[len(before)], tools=tools),
        )

    def _hh(self, row: Row, chosen: str, rejected: str, better: tuple[str, str], worse: tuple[str, str]) -> Pair:
        if self._template.has_chat:
            return self._split(row, read_hh(chosen), read_hh(rejected))
        if better[0] != worse[0]:
            raise DataError(f"{row.where}: HH-RLHF's texts need to be equal up to the last 'Assistant:'")
        if better[1].strip() == worse[1].strip():
            raise DataError(_equal_answers_message(row, self._fields))
        if not (better[1].strip() and worse[1].strip()):
            raise DataError(f"{row.where}: HH-RLHF's texts need a text after the last 'Assistant:'")
        names = self._fields
        prompt = self._template.reader.fill(row, better[0].lstrip("\n"))
        return (
            TextExample(prompt, better[1], ("the prompt", f"field {names.chosen!r} (data.fields.chosen)")),
            TextExample(prompt, worse[1], ("the prompt", f"field {names.rejected!r} (data.fields.rejected)")),
        )

    def _rated(self, row: Row) -> Pair | None:
        """Return the pair of a row of HelpSteer3: a preference below 0 is for the first response."""
        preference = row.fields["overall_preference"]
        if not (_is_number(preference) and -3 <= preference <= 3):
            raise DataError(f"{row.where}: field 'overall_preference' needs a number from -3 to 3, got {preference!r}")
        if preference == 0:
            return None
        first, second = (
            row.response(f"response{i}", f"data.fields.{'chosen' if is_better else 'rejected'}")
            for i, is_better in ((1, preference < 0), (2, preference > 0))
        )
        before = self._context(row)
        answers = [[*before, {"role": "assistant", "content": text}] for text in (first, second)]
        return self._split(row, *(answers if preference < 0 else answers[::-1]))

    def _ranked(self, row: Row) -> Pair | None:
        """Return the pair of a row of NeMo-RL's format: the completion with the lower rank is the preferred one."""
        completions = row.fields["completions"]
        are_two = isinstance(completions, list) and len(completions) == 2
        if not are_two or not all(isinstance(each, dict) and _is_number(each.get("rank")) for each in completions):
            got = f"{len(completions)} entries" if isinstance(completions, list) else type(completions).__name__
            raise DataError(
                f"{row.where}: field 'completions' needs two entries {{rank, completion}}, whose ranks are numbers, "
                f"got {got if not are_two else completions!r}"
            )
        better, worse = sorted(completions, key=lambda each: each["rank"])
        if better["rank"] == worse["rank"]:
            return None
        before = self._context(row)
        answers = [
            self._template.messages(row, each.get("completion"), "completions", f"data.fields.{key}")
            for each, key in ((better, "chosen"), (worse, "rejected"))
        ]
        return self._split(row, *([*before, *answer] for answer in answers))

    def _context(self, row: Row) -> Messages:
        """Return the messages in the column `context`, a list or the text of one."""
        context = row.value("context", "data.fields.prompt")
        self._template.require_chat(row, "field 'context'")
        if isinstance(context, str):
            return as_question(self._template.reader.fill(row, context))
        return self._template.messages(row, context, "context", "data.fields.prompt")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal_answers_message(row: Row, fields: FieldsConfig) -> str:
    return f"{row.where}: {_name_answers(fields)} hold the same answer; a preference needs two"


def _name_answers(fields: FieldsConfig) -> str:
    return f"fields {fields.chosen!r} (data.fields.chosen) and {fields.rejected!r} (data.fields.rejected)"


def read_margin(row: Row, field: str) -> float:
    """Return the margin of a pair, 0 if it has none.

    Raises:
        DataError: it is no number from 0 to `MAX_REWARD`.
    """
    value = row.find(field)
    if value is None:
        return 0.0
    if not (_is_number(value) and 0 <= value <= MAX_REWARD):
        raise DataError(
            f"{row.where}: field {field!r} (data.fields.margin) needs a number from 0 to {MAX_REWARD:g}, got {value!r}"
        )
    return float(value)


def read_safety(row: Row, fields: FieldsConfig) -> tuple[bool, bool] | None:
    """Return the safety labels of the chosen and the rejected answer; None if the row has none."""
    names = {"data.fields.chosen_safe": fields.chosen_safe, "data.fields.rejected_safe": fields.rejected_safe}
    values = {key: row.find(field) for key, field in names.items()}
    if all(value is None for value in values.values()):
        return None
    for key, value in values.items():
        if not isinstance(value, bool):
            got = "nothing, but the other answer has a label" if value is None else repr(value)
            raise DataError(f"{row.where}: field {names[key]!r} ({key}) needs true or false, got {got}")
    chosen, rejected = values.values()
    return bool(chosen), bool(rejected)


def _mixed_labels_message(row: Row, first: Row, fields: FieldsConfig) -> str:
    has_labels = read_safety(row, fields) is not None
    return (
        f"{row.where}: the row has {'safety' if has_labels else 'no safety'} labels (data.fields.chosen_safe, "
        f"data.fields.rejected_safe), unlike {first.where}; either all rows of a file need them, or none"
    )
