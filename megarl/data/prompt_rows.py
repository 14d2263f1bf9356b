"""Read prompts and reference answers from rows, by the names of `data.fields` or of a known format."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.data import FieldsConfig, PromptFormat
from megarl.data.rows import Row, refuse_media
from megarl.errors import ConfigError, DataError

PLACEHOLDER = "{prompt}"

PROMPT_FIELDS = (
    "prompt",  # verl, slime, TRL
    "messages",  # OpenAI
    "conversations",  # ShareGPT
    "question",  # verifiers, GSM8K
    "problem",  # MATH and other collections of problems
    "responses_create_params.input",  # NeMo-Gym
)
"""Where formats have the prompt; `data.fields.prompt: prompt` stands for the first of these that a row has."""

ANSWER_FIELDS = (
    "answer",  # verifiers
    "reward_model.ground_truth",  # verl
    "label",  # slime
    "expected_answer",  # NeMo-Gym
    "ground_truth",
    "info.answer",  # verifiers
    "extra_info.answer",  # verl
)
"""Where formats have the reference answer; `data.fields.answer: answer` stands for the first that a row has."""

TOOL_FIELDS = ("tools", "responses_create_params.tools")

INSTRUCTION, INSTRUCTION_INPUT, INSTRUCTION_OUTPUT = "instruction", "input", "output"
"""Columns of Alpaca: a task, text that it is about, which may be empty, and the answer."""

OPTIONAL_FIELDS = ("answer", "tools", "margin", "chosen_safe", "rejected_safe")
"""Keys of `data.fields` that a row may lack; one that it needs is missed at the first row."""

DEFAULT_FIELDS = FieldsConfig()

_NAMES = re.compile(r"(?<!\\)(?P<command>\\[A-Za-z]+)?\{(?P<name>[A-Za-z_][\w.-]*)\}")
r"""A column's name in braces; not after a command of LaTeX, as in `\boxed{answer}`."""


class ExplicitFields:
    """Finds names of optional fields, other than the default ones, that no row has."""

    def __init__(self, fields: FieldsConfig, key: str) -> None:
        """`key`: YAML key of the section, for messages."""
        self._missing = {
            f"{key}.fields.{name}": getattr(fields, name)
            for name in OPTIONAL_FIELDS
            if getattr(fields, name) != getattr(DEFAULT_FIELDS, name)
        }
        self._columns: dict[str, None] = {}

    def see(self, row: Row) -> None:
        """Take a row into account."""
        if self._missing:
            self._columns.update(dict.fromkeys(row.fields))
            self._missing = {key: field for key, field in self._missing.items() if not row.has(field)}

    def require_found(self, path: Path) -> None:
        """Check that each field was in a row.

        Raises:
            DataError: no row has one; names the columns that there are.
        """
        for key, field in self._missing.items():
            columns = ", ".join(repr(name) for name in sorted(self._columns))
            raise DataError(f"{path}: no row has field {field!r} ({key}); the columns are {columns}")


class PromptReader:
    """Reads the prompt, tools and reference answers of rows.

    Raises:
        ConfigError: the prompt template has no place for the prompt or another column.
    """

    def __init__(self, config: PromptFormat, *, key: str = "data") -> None:
        """`key`: YAML key of the section, for messages."""
        self._config, self._key = config, key
        names = [match["name"] for match in _NAMES.finditer(config.prompt_template) if not match["command"]]
        if not names:
            raise ConfigError(
                f"{key}.prompt_template needs {PLACEHOLDER} or other columns in braces in it, got "
                f"{config.prompt_template!r}"
            )
        self.needs_prompt = "prompt" in names
        """Whether the prompt template has `{prompt}`, not only other columns."""
        self.has_filled = False
        """Whether the prompt template was applied to any row."""

    def prompt(self, row: Row) -> str | list[Any]:
        """Return the prompt of a row: a text, with the prompt template applied, or a list of messages.

        Raises:
            DataError: the row has none, or images, videos or audio.
        """
        refuse_media(row)
        if not self.needs_prompt:
            return self.fill(row, "")
        field = self.prompt_field(row)
        if field == INSTRUCTION:
            return self.fill(row, read_instruction(row))
        value = row.value(field, f"{self._key}.fields.prompt")
        if not isinstance(value, str | list):
            got = type(value).__name__
            raise DataError(
                f"{row.where}: field {field!r} ({self._key}.fields.prompt) needs a string or a list of messages, "
                f"got {got}"
            )
        return self.fill(row, value) if isinstance(value, str) else value

    def prompt_field(self, row: Row) -> str:
        """Return the name of the field that holds the prompt of a row."""
        name = self._config.fields.prompt
        if name != DEFAULT_FIELDS.prompt:
            return name
        known = (name, self._config.fields.messages, *PROMPT_FIELDS[1:], INSTRUCTION)
        return next((each for each in known if row.find(each) is not None), name)

    def tools(self, row: Row) -> Any:
        """Return the definitions of tools of a row as they are written; None if it has none."""
        return _find_first(row, self._config.fields.tools, TOOL_FIELDS)

    def answers(self, row: Row) -> tuple[str, ...]:
        """Return the reference answers of a row as texts, each of which is right; empty if it has none.

        Blank texts, NaN and infinity are none. Booleans, decimals, bytes, dates and structured answers are none either:
        reward functions read them from the row.
        """
        known = (*ANSWER_FIELDS, INSTRUCTION_OUTPUT) if row.has(INSTRUCTION) else ANSWER_FIELDS
        value = _find_first(row, self._config.fields.answer, known)
        texts = (_answer_text(each) for each in (value if isinstance(value, list) else [value]))
        return tuple(dict.fromkeys(text for text in texts if text is not None))

    def fill(self, row: Row, prompt: str) -> str:
        r"""Return the prompt template with the prompt, and with the columns of the row that it names.

        Raises:
            DataError: a name in braces is no column.
        """
        self.has_filled = True

        def replace(match: re.Match[str]) -> str:
            name = match["name"]
            if match["command"]:
                return match[0]
            if name == "prompt":
                return prompt
            if not row.has(name):
                columns = ", ".join(repr(column) for column in row.fields)
                raise DataError(
                    f"{row.where}: {self._key}.prompt_template names {{{name}}}, which the row does not have; it has "
                    f"{columns}"
                )
            value = row.find(name)
            return "" if value is None else str(value)

        return _NAMES.sub(replace, self._config.prompt_template)


def _find_first(row: Row, name: str, known: Sequence[str]) -> Any:
    """Return the value of field `name`; if this is the default, the first of the `known` fields that is not null."""
    for each in known if name == known[0] else (name,):
        value = row.find(each)
        if value is not None:
            return value
    return None


def _answer_text(value: object) -> str | None:
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


def read_instruction(row: Row) -> str:
    """Return the task of a row of Alpaca, with the text that it is about in the next line, if there is one.

    Raises:
        DataError: one of them is no text.
    """
    task, more = row.text(INSTRUCTION, "data.fields.prompt"), row.find(INSTRUCTION_INPUT)
    if more is None:
        return task
    if not isinstance(more, str):
        raise DataError(f"{row.where}: field {INSTRUCTION_INPUT!r} needs a string, got {type(more).__name__}")
    return f"{task}\n{more}" if more.strip() else task
