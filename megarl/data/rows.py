"""Rows of data files, with their line numbers for error messages, and the prompts and reference answers in them.

Prompts and answers are found by the names of `data.fields`, or those of a known format.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megarl.config.data import FieldsConfig, PromptFormat
from megarl.data.data_files import find_data_files, read_file
from megarl.errors import ConfigError, DataError
from megarl.model_files.json_object import refuse_lfs_pointer
from megarl.text import replace_surrogates

QUIET_SECONDS = 3.0
"""Work that ends within this time shows no progress bar."""


def track[T](batches: Iterable[list[T]], what: str, *, quiet_seconds: float = QUIET_SECONDS) -> Iterator[list[T]]:
    """Yield `batches` unchanged; after `quiet_seconds`, show the number of rows on stderr if it is a terminal."""
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} rows"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task(what, total=None)
    begun, shown = time.monotonic(), False
    try:
        for batch in batches:
            yield batch
            progress.advance(task, len(batch))
            if not shown and console.is_terminal and time.monotonic() - begun > quiet_seconds:
                progress.start()
                shown = True
    finally:
        if shown:
            progress.stop()


class Row(NamedTuple):
    """A row and its position in a data file."""

    path: Path
    line: int
    """Line of a JSONL or CSV file (blank lines count), number of the row in another file; from 1."""
    fields: Mapping[str, Any]
    name: str = ""
    """Name of the file among those of a pattern, if it is not the last part of its path."""

    @property
    def where(self) -> str:
        """`<path>:<line>`, to start an error message with."""
        return f"{self.path}:{self.line}"

    @property
    def has_filled_objects(self) -> bool:
        """Whether objects have the keys of all rows, with null for those that they lack, as in columns of a table."""
        return self.path.suffix.lower() in (".parquet", ".arrow")

    @property
    def prompt_id(self) -> str:
        """Identifier of the row, `<file name>:<line>`; bytes of the name that are not UTF-8 are U+FFFD."""
        return f"{replace_surrogates(self.name or self.path.name)}:{self.line}"

    def text(self, field: str, key: str) -> str:
        """Return the string in `field`; `key` is the YAML key that names the field.

        Raises:
            DataError: the field is missing or not a string.
        """
        value = self.value(field, key)
        if not isinstance(value, str):
            raise DataError(f"{self.where}: field {field!r} ({key}) needs a string, got {type(value).__name__}")
        return value

    def response(self, field: str, key: str) -> str:
        """Return the text in `field` that a model is trained on; `key` is the YAML key that names the field.

        Raises:
            DataError: the field is missing, not a string, or blank.
        """
        text = self.text(field, key)
        if not text.strip():
            raise DataError(f"{self.where}: field {field!r} ({key}) is {'blank' if text else 'empty'}")
        return text

    def value(self, field: str, key: str) -> Any:
        """Return the value of `field`; `key` is the YAML key that names the field.

        Raises:
            DataError: the field is missing.
        """
        found = self._look_up(field)
        if found is None:
            has = ", ".join(repr(name) for name in self.fields) or "no fields"
            raise DataError(f"{self.where}: field {field!r} ({key}) is missing; the row has {has}")
        return found[0]

    def find(self, field: str) -> Any:
        """Return the value of `field`; None if it is null or missing."""
        found = self._look_up(field)
        return None if found is None else found[0]

    def has(self, field: str) -> bool:
        """Whether the row has `field`, which may be null."""
        return self._look_up(field) is not None

    def _look_up(self, field: str) -> tuple[Any] | None:
        """Return the value of `field` in a tuple; None if it is missing.

        A name with dots that is no column is a path into objects and lists, which may be the text of JSON:
        `reward_model.ground_truth`, `answers.0`.
        """
        if field in self.fields:
            return (self.fields[field],)
        name, *path = field.split(".")
        if not path or name not in self.fields:
            return None
        value = self.fields[name]
        for part in path:
            if isinstance(value, str):
                value = _parse(value)
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return (value,)


def _parse(text: str) -> Any:
    """Return the content of a text of JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of what no model takes."""


def refuse_media(row: Row) -> None:
    """Raise a `DataError` if a row has images, videos or audio; empty lists are none.

    A text in a column such as `image` is none either: rows for agents name the image of a container there.
    """
    for name in MEDIA:
        value = row.fields.get(name)
        if isinstance(value, dict | list | bytes) and value:
            raise DataError(f"{row.where}: field {name!r} is not empty, and models take no images, videos or audio")


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of `path` in order, read lazily: a file, or the files in a folder or of a pattern.

    Raises:
        DataError: as `find_data_files`; there are no rows, or a row cannot be read (the message names file:line).
    """
    files = find_data_files(path)
    for file in files:
        refuse_lfs_pointer(file)
    names = _name_files(files)
    rows = (
        Row(file, line, fields, name)
        for file, name in zip(files, names, strict=True)
        for line, fields in read_file(file)
    )
    return _require_rows(Path(path), rows)


def _name_files(files: list[Path]) -> list[str]:
    """Return a name for each file; empty where the last part of its path is one."""
    if len({file.name for file in files}) == len(files):
        return [""] * len(files)
    parents = [len(file.parts) - 1 for file in files]
    shared = 0
    while shared < min(parents) and len({file.parts[shared] for file in files}) == 1:
        shared += 1
    return ["/".join(file.parts[shared:]) for file in files]


def _require_rows(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: the data file has no rows")


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
