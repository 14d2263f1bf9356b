"""Settings of a run of slime: a launch script with arguments of slime, Megatron and SGLang."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.errors import ConfigError
from megarl.importing.peer_settings import Setting
from megarl.importing.shell_script import Word, find_launch_command
from megarl.importing.slime.argument_values import ENTRY_KEY
from megarl.importing.verl.hydra_values import parse_value

ENTRY = re.compile(r"(^|/)train(_async)?\.py$")
ARRAY = re.compile(r"\$\{?\w+(\[[@*]\])?\}?")
NEGATED = {"--no-offload-train": "--offload-train", "--no-offload-rollout": "--offload-rollout"}
"""Arguments that turn another one off."""


def read_run(text: str, path: Path, variables: Mapping[str, str]) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings by argument, such as `--lr`, and notes on the reading.

    Raises:
        ConfigError: no command starts slime, or the file is not a script.
        DataError: the script is malformed.
    """
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{path}: slime is configured by arguments: give the script that starts train.py")
    command = find_launch_command(text, path, lambda word: bool(ENTRY.search(word)), variables=variables)
    notes = list(command.notes)
    given = read_arguments(command.arguments, notes)
    entry = command.words[command.entry]
    given[ENTRY_KEY] = Setting(key=ENTRY_KEY, value=entry.text, origin=entry.where)
    return given, notes


def read_arguments(words: Sequence[Word], notes: list[str]) -> dict[str, Setting]:
    """Return the settings of `--name`, `--name value ...` and `--name=value`; the last of equal names wins."""
    given: dict[str, Setting] = {}
    name, values, origin = "", list[Word](), ""

    def finish() -> None:
        if name:
            given.pop(name, None)
            given[name] = _setting(name, values, origin)

    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            finish()
            name, equals, value = word.text.partition("=")
            values = [replace(word, text=value)] if equals else []
            origin = word.where
        elif word.unknown and (not name or ARRAY.fullmatch(word.text)) and "@" in word.text + "".join(word.unknown):
            notes.append(
                f"{word.where}: the arguments {word.text} come from a file that was not found, and were not read"
            )
        elif name:
            values.append(word)
        elif word.text.strip():
            notes.append(f"{word.where}: {word.text!r} is no argument --name, and was not read")
    finish()
    return given


def _setting(name: str, values: Sequence[Word], origin: str) -> Setting:
    unknown = tuple(u for value in values for u in value.unknown)
    if name in NEGATED:
        return Setting(key=NEGATED[name], value=False, origin=origin)
    if not values:
        return Setting(key=name, value=True, origin=origin)
    if unknown:
        return Setting(key=name, value=" ".join(value.text for value in values), origin=origin, unknown=unknown)
    parsed = [_parsed(value.text) for value in values]
    return Setting(key=name, value=parsed if len(parsed) > 1 else parsed[0], origin=origin)


def _parsed(text: str) -> object:
    try:
        return parse_value(text)
    except ValueError:
        return text
