"""Settings of a run of verl: a launch script with Hydra overrides, or a YAML file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.config.load import find_leaves
from megarl.errors import ConfigError
from megarl.importing.peer_settings import Setting
from megarl.importing.shell_script import Word, find_launch_command
from megarl.importing.verl.hydra_values import parse_value, resolve_all
from megarl.importing.verl.run_layout import ENTRY_KEY
from megarl.importing.verl.table import DEFAULTS

ENTRY = re.compile(
    r"(verl|recipe)\.[\w.]*(main_\w+|fully_async_main|main)$|(^|/)(main_ppo|main_dapo|fully_async_main)\.py$"
)
OVERRIDE = re.compile(r"(\+\+|\+|~)?([\w.@/*-]+)=(.*)", re.DOTALL)
OPTIONS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")


def read_run(text: str, path: Path, variables: Mapping[str, str]) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings by key, and notes on the reading.

    Raises:
        ConfigError: an override is malformed, or no command starts verl.
        DataError: the script is malformed.
    """
    notes: list[str] = []
    if path.suffix in (".yaml", ".yml"):
        given = {setting.key: setting for setting in _read_yaml(text, path, notes)}
    else:
        command = find_launch_command(text, path, lambda word: bool(ENTRY.search(word)), variables=variables)
        notes += command.notes
        given = _read_arguments(command.arguments, path, notes)
        entry = command.words[command.entry]
        given[ENTRY_KEY] = Setting(key=ENTRY_KEY, value=entry.text, origin=entry.where)
    return resolve_all(given, DEFAULTS), notes


def _read_arguments(words: Sequence[Word], path: Path, notes: list[str]) -> dict[str, Setting]:
    overrides: list[Word] = []
    options: dict[str, str] = {}
    pending = ""
    for word in words:
        name, equals, value = word.text.partition("=")
        if pending:
            options[pending], pending = word.text, ""
        elif name in OPTIONS:
            options[name] = value
            pending = "" if equals else name
        else:
            overrides.append(word)
    given = {setting.key: setting for setting in _read_config_files(options, path, notes)}
    for word in overrides:
        _apply(word, given, notes)
    return given


def _read_config_files(options: Mapping[str, str], path: Path, notes: list[str]) -> Iterator[Setting]:
    """Yield the settings of the file that `--config-path` and `--config-name` name, if it is there."""
    name = options.get("--config-name") or options.get("-cn")
    folder = next((options[o] for o in ("--config-path", "-cp", "--config-dir", "-cd") if o in options), None)
    if name is None or re.fullmatch(r"\w*ppo(_megatron)?_trainer", name.removesuffix(".yaml")):
        return
    candidates = [Path(folder or "."), path.parent / (folder or ".")]
    file = next((f for base in candidates if (f := base / f"{name.removesuffix('.yaml')}.yaml").is_file()), None)
    if file is None:
        notes.append(
            f"{path.name} starts from the configuration {name} in {folder or 'its default folder'}, which was not "
            "found: its keys are those of verl's defaults here"
        )
        return
    yield from _read_yaml(file.read_text(encoding="utf-8"), file, notes)


def _read_yaml(text: str, path: Path, notes: list[str]) -> Iterator[Setting]:
    for key, value, line in find_leaves(text, str(path)):
        if key == "defaults":
            notes.append(f"{path.name}:{line}: defaults {value!r}: keys that are not given have verl's defaults")
        elif not key.startswith("hydra.") and key.rpartition(".")[2] != "_target_":
            yield Setting(key=key, value=value, origin=f"{path.name}:{line}")


def _apply(word: Word, given: dict[str, Setting], notes: list[str]) -> None:
    """Apply one override, such as `a.b=1`, `+a.b=1`, `++a.b=1` or `~a.b`."""
    origin = word.where
    if word.text.startswith("~"):
        for key in [key for key in given if key == word.text[1:] or key.startswith(f"{word.text[1:]}.")]:
            del given[key]
        return
    match = OVERRIDE.fullmatch(word.text)
    if not match:
        if word.text.strip() and not word.unknown:
            notes.append(f"{origin}: {word.text!r} is no override key=value, and was not read")
        return
    key, text = match.group(2).partition("@")[0] if "@" in match.group(2) else match.group(2), match.group(3)
    if "@" in match.group(2):
        notes.append(f"{origin}: {word.text} chooses a group of keys, which have verl's defaults here")
        return
    if key.startswith("hydra."):
        return
    try:
        value: object = text if word.unknown else parse_value(text)
    except ValueError as e:
        raise ConfigError(f"{origin}: {key}={text} is not valid: {e}") from e
    for leaf, item in _leaves(key, value):
        given.pop(leaf, None)  # the last value comes last
        given[leaf] = Setting(key=leaf, value=item, origin=origin, unknown=word.unknown)


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, value
