"""Check YAML blocks, overrides and dotted keys against megarl's configuration types."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from megarl.config import STAGES, make_convert_config, make_score_config
from megarl.config.load import load_config, make_config
from megarl.config.section import merge
from megarl.errors import ConfigError
from megarl.offline.config_schema import make_schema

ROOT = Path(__file__).parents[2]

REQUIRED = {"run_dir": "runs/x", "model": {"path": "models/x"}, "data": {"path": "x.jsonl"}}
"""The keys without defaults, which an excerpt may lack."""

Finding = tuple[int, str]
"""Line of a block, counted from 0, and what is wrong there."""


def find_yaml_problems(text: str) -> list[Finding]:
    """Return line, counted from 0, and message of each problem of a YAML block.

    A block is a configuration of one of megarl's commands, or an excerpt of one. What needs several sections, such as
    the number of slots, is checked only in a whole configuration. An algorithm of the reader's own is not checked, as
    its module does not exist here. Kubernetes objects are only parsed.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return [(mark.line if mark else 0, f"not valid YAML: {getattr(error, 'problem', error)}")]
    found = []
    for tree in documents:
        if not isinstance(tree, dict):
            found.append((0, f"needs keys of a configuration, got {type(tree).__name__}"))
        elif not {"apiVersion", "kind"} <= tree.keys():
            found += [(_line_of(text, message), message) for message in find_config_problems(tree)]
    return found


def find_config_problems(tree: dict[str, Any]) -> list[str]:
    """Return the problems of a configuration or excerpt; none if it is valid for one of the commands."""
    found: dict[str, list[str]] = {}
    for command in STAGES:
        found[command] = _find_stage_problems(command, tree)
        if not found[command]:
            return []
    command = next((name for name in ("rm", "dpo") if name in tree), "train")
    return found[command]


def _find_stage_problems(command: str, tree: dict[str, Any]) -> list[str]:
    kind, is_whole = STAGES[command], "run_dir" in tree
    with own_modules():
        try:
            required = {} if is_whole else _required_beside(tree)
            make_config(kind, merge(required, _without_placeholder_algorithm(tree)))
        except ConfigError as error:
            lines = str(error).splitlines()
            return lines if is_whole else [line for line in lines if not line.startswith(f"{kind.__name__}: ")]
    return []


def _required_beside(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that a part of a configuration leaves out; sources take the place of a path."""
    has_sources = "sources" in (tree.get("data") or {})
    return {key: value for key, value in REQUIRED.items() if not (key == "data" and has_sources)}


def _without_placeholder_algorithm(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without `algorithm` if its type is an import path whose module only the reader has."""
    tree = copy.deepcopy(tree)
    section = tree.get("algorithm")
    module, colon, _ = str(section.get("type")).partition(":") if isinstance(section, dict) else ("", "", "")
    if colon and module.partition(".")[0] != "megarl" and find_spec(module.partition(".")[0]) is None:
        del tree["algorithm"]
    return tree


def find_override_problem(command: str, config: Path | None, overrides: Sequence[str]) -> str | None:
    """Return what is wrong with `--set` overrides of a command, in a configuration that need not exist."""
    with own_modules():
        try:
            if command == "score":
                make_score_config("models/x", overrides)
            elif command == "convert":
                make_convert_config(overrides)
            elif command in STAGES and config is not None and (ROOT / config).is_file():
                load_config(STAGES[command], ROOT / config, list(overrides))
            elif command in STAGES:
                make_config(STAGES[command], copy.deepcopy(REQUIRED), overrides)
        except ConfigError as error:
            lines = [line for line in str(error).splitlines() if not line.startswith(f"{_type_name(command)}: ")]
            return "; ".join(lines).replace(f"{ROOT}/", "") or None
    return None


def _type_name(command: str) -> str:
    return STAGES[command].__name__ if command in STAGES else command


@contextmanager
def own_modules() -> Iterator[None]:
    """Make the modules of the examples importable, as PYTHONPATH does in their commands."""
    folders = [str(folder) for folder in sorted((ROOT / "examples").iterdir()) if folder.is_dir()]
    with mock.patch.object(sys, "path", [*sys.path, *folders]):
        yield


def _line_of(text: str, message: str) -> int:
    """Return the line of the key that a message begins with, or of its innermost parent in the text."""
    node, line = yaml.compose(text.partition("\n---")[0]), 0
    for part in message.partition(": ")[0].split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key, value in pairs:
            if key.value == part:
                node, line = value, key.start_mark.line
                break
        else:
            break
    return line


def is_config_key(path: str) -> bool:
    """Return whether a dotted path is a key of some command, or does not begin with a section of any."""
    parts = path.split(".")
    if re.search(r"\.(py|md|json|jsonl|yaml|safetensors|txt|sh|sbatch)$", path):
        return True
    schemas = [_schema(command) for command in STAGES]
    own = [schema for schema in schemas if parts[0] in schema["properties"]]
    return not own or any(any(True for _ in find_nodes(schema, schema, parts)) for schema in own)


@cache
def _schema(command: str) -> dict[str, Any]:
    return make_schema(command)


def find_nodes(
    schema: dict[str, Any], node: dict[str, Any], parts: list[str], map_key: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the key with the path `parts` below `node`; none if there is no such key.

    Args:
        schema: the whole schema, with its definitions.
        map_key: the name in `parts` that stands for a key of the user's choice; None: any name does.
    """
    if "$ref" in node:
        yield from find_nodes(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], parts, map_key)
        return
    alternatives = [each for kind in ("anyOf", "oneOf") for each in node.get(kind, ())]
    for each in alternatives:
        yield from find_nodes(schema, each, parts, map_key)
    if not parts:
        if not alternatives:
            yield node
        return
    first, *rest = parts
    extra = node.get("additionalProperties")
    if first in node.get("properties", {}):
        yield from find_nodes(schema, node["properties"][first], rest, map_key)
    elif isinstance(extra, dict) and map_key in (None, first):
        yield from find_nodes(schema, extra, rest, map_key)
    elif extra is True and map_key is None and not node.get("properties"):  # arguments of a function
        yield {}
