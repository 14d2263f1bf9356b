"""Settings of a run of NeMo-RL: a YAML file with those it inherits from, and overrides of a launch script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config.load import find_leaves
from megarl.errors import ConfigError, DataError
from megarl.importing.nemo_rl.datasets import PROMPT_FILES, text_key
from megarl.importing.nemo_rl.key_tables import TABLES
from megarl.importing.shell_script import Word, find_launch_command
from megarl.importing.tables import PeerTable, Setting
from megarl.importing.verl.hydra_values import parse_value, resolve_all

ENTRY = re.compile(r"(^|/)run_(\w+)\.py$")
OVERRIDE = re.compile(r"(\+\+|\+)?([\w.-]+)=(.*)", re.DOTALL)
MAX_DEPTH = 16
EXAMPLES: Mapping[str, str] = {
    "grpo": "grpo_math_1B.yaml",
    "ppo": "ppo_math_1B.yaml",
    "sft": "sft.yaml",
    "dpo": "dpo.yaml",
    "rm": "rm.yaml",
}
"""Section of an algorithm -> NeMo-RL's own file of defaults, whose values the tables have."""


def read_run(text: str, path: Path, variables: Mapping[str, str]) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings by key, and notes on the reading.

    Raises:
        ConfigError: an override is malformed, no command starts NeMo-RL, or files inherit from each other in a circle.
        DataError: the script is malformed.
    """
    notes: list[str] = []
    if path.suffix in (".yaml", ".yml"):
        given = _read_yaml(text, path, notes)
        return _finish(given, path), notes
    command = find_launch_command(text, path, lambda word: bool(ENTRY.search(word)), variables=variables)
    notes += command.notes
    match = ENTRY.search(command.words[command.entry].text)
    assert match is not None, command
    script = match.group(2)
    if script not in EXAMPLES:
        raise ConfigError(
            f"{path}: run_{script}.py has no equivalent; megarl import reads run_{', run_'.join(EXAMPLES)}"
        )
    given = _read_arguments(command.arguments, path, script, notes)
    return _finish(given, path), notes


def table_of(given: Mapping[str, Setting]) -> PeerTable:
    """Return the table of the algorithm that the settings configure.

    Raises:
        ConfigError: it has no table, or none is configured.
    """
    sections = {key.partition(".")[0] for key in given}
    found = [name for name in ("ppo", "dpo", "rm", "sft", "grpo") if name in sections]
    if not found and "distillation" in sections:
        raise ConfigError(
            "the configuration has the section distillation, whose loss is over the teacher's top-k tokens; megarl "
            "distills on sampled tokens: write the configuration of algorithm.type: distillation by hand"
        )
    if not found:
        known = "the section eval" if "eval" in sections else "no section of an algorithm"
        raise ConfigError(f"the configuration has {known}; megarl import reads runs with one of {', '.join(EXAMPLES)}")
    return TABLES[found[0]]


def _read_arguments(words: Sequence[Word], path: Path, script: str, notes: list[str]) -> dict[str, Setting]:
    config: Word | None = None
    overrides: list[Word] = []
    is_config = False
    for word in words:
        if is_config:
            config, is_config = word, False
        elif word.text == "--config":
            is_config = True
        elif word.text.startswith("--config="):
            config = replace(word, text=word.text.partition("=")[2])
        else:
            overrides.append(word)
    given: dict[str, Setting] = {}
    if config is None:
        notes.append(
            f"{path.name}: without --config, run_{script}.py reads {EXAMPLES[script]}, whose values are defaults"
        )
    elif config.unknown or (file := _find(config.text, path)) is None:
        notes.append(
            f"{config.where}: the configuration {config.text} was not found: other keys have the "
            f"values of {EXAMPLES[script]}"
        )
    else:
        given = _read_yaml(file.read_text(encoding="utf-8"), file, notes)
    given.setdefault(f"{script}.seed", Setting(key=f"{script}.seed", value=42, origin=path.name))
    for word in overrides:
        _apply(word, given, notes)
    return given


def _find(name: str, path: Path) -> Path | None:
    """Return a file, sought from the working directory and from the folders above the script or configuration."""
    folders = [Path(), *(folder for folder in path.absolute().parents)]
    return next((file for folder in folders if (file := folder / name).is_file()), None)


def _read_yaml(text: str, path: Path, notes: list[str], depth: int = 0) -> dict[str, Setting]:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: defaults name each other in a circle")
    leaves = list(find_leaves(text, str(path)))
    given: dict[str, Setting] = {}
    for key, value, line in leaves:
        if key != "defaults":
            continue
        for name in value if isinstance(value, list) else [value]:
            file = path.parent / str(name)
            try:
                base = file.read_text(encoding="utf-8")
            except OSError:
                example = EXAMPLES.get(_section(leaves), EXAMPLES["grpo"])
                notes.append(
                    f"{path.name}:{line}: {name}, which the file inherits from, was not found: keys that are not given "
                    f"have the values of {example}"
                )
                continue
            except UnicodeDecodeError as e:
                raise DataError(f"{file}: not valid UTF-8 at byte {e.start}") from e
            for setting in _read_yaml(base, file, notes, depth + 1).values():
                _put(given, setting)
    for key, _, _ in leaves:
        if key.endswith("._override_"):
            _remove(given, key.removesuffix("._override_"))
    for key, value, line in leaves:
        if key == "defaults" or key.endswith("._override_") or value == {} or value == "???":
            continue
        _put(given, Setting(key=key, value=value, origin=f"{path.name}:{line}"))
    return given


def _section(leaves: Sequence[tuple[str, object, int]]) -> str:
    names = {key.partition(".")[0] for key, _, _ in leaves}
    return next((name for name in ("ppo", "dpo", "rm", "sft") if name in names), "grpo")


def _put(given: dict[str, Setting], setting: Setting) -> None:
    """Set a key: a value replaces a section, and a section a value."""
    _remove(given, setting.key)
    parts = setting.key.split(".")
    for i in range(1, len(parts)):
        given.pop(".".join(parts[:i]), None)
    given[setting.key] = setting


def _remove(given: dict[str, Setting], key: str) -> None:
    for other in [other for other in given if other == key or other.startswith(f"{key}.")]:
        del given[other]


def _apply(word: Word, given: dict[str, Setting], notes: list[str]) -> None:
    """Apply one override, such as `a.b=1`, `++a.b=1` or `~a.b`."""
    origin = word.where
    if word.text.startswith("~"):
        _remove(given, word.text[1:].partition("=")[0])
        return
    match = OVERRIDE.fullmatch(word.text)
    if not match:
        if word.text.strip():
            notes.append(f"{origin}: {word.text!r} is no override key=value, and was not read")
        return
    key, text = match.group(2), match.group(3)
    try:
        value: object = text if word.unknown else parse_value(text)
    except ValueError as e:
        raise ConfigError(f"{origin}: {key}={text} is not valid: {e}") from e
    _put_value(given, key, value, origin, word.unknown)


def _put_value(given: dict[str, Setting], key: str, value: object, origin: str, unknown: tuple[str, ...]) -> None:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            _put_value(given, f"{key}.{name}", item, origin, unknown)
    else:
        _put(given, Setting(key=key, value=value, origin=origin, unknown=unknown))


def _finish(given: Mapping[str, Setting], path: Path) -> dict[str, Setting]:
    """Resolve interpolations, also of keys that are as in NeMo-RL's own file of defaults, and read files of prompts."""
    defaults = table_of(given).defaults
    resolved = resolve_all(given, defaults)
    for key in (f"data.{part}.{name}" for part in ("train", "default") for name in PROMPT_FILES):
        name = resolved[key].value if key in resolved else defaults.get(key)
        file = _find(name, path) if isinstance(name, str) and name else None
        if file is not None:
            text = file.read_text(encoding="utf-8", errors="replace")
            resolved[text_key(key)] = Setting(key=text_key(key), value=text, origin=file.name)
    return resolved
