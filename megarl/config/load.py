"""Load a validated, frozen configuration from a YAML file and `--set key=value` overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from megarl.config.section import Section
from megarl.errors import ConfigError
from megarl.text import has_surrogate, join_surrogates

TAG = "tag:yaml.org,2002:"

AMBIGUOUS_TAGS = {f"{TAG}int", f"{TAG}float", f"{TAG}timestamp"}
"""Tags of plain scalars that YAML 1.1 finds where YAML 1.2 finds texts or other numbers."""

INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")
FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?"
    r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)


FIXED_KEYS: Mapping[str, tuple[object, str]] = {
    "algorithm.pretraining.min_explained_variance": (0.5, "0.5"),
    "algorithm.pretraining.settled": (0.02, "0.02"),
    "algorithm.pretraining.window": (5, "5 steps"),
    "recovery.backoff_seconds": (1.0, "1 s"),
    "recovery.max_backoff_seconds": (60.0, "60 s"),
    "recovery.restart_window_seconds": (86_400.0, "86400 s"),
    "reward.terms.*.backoff_seconds": (0.5, "0.5 s"),
    "reward.terms.*.batch_wait_seconds": (0.02, "0.02 s"),
    "reward.terms.*.breaker": ({"failures": 5, "cooldown_seconds": 10.0}, "5 failures in a row and 10 s"),
}
"""Keys that earlier versions had and that are constants -> (value, in words). `*` stands for the name of a term."""


class _Loader(yaml.SafeLoader):
    """SafeLoader whose numbers are those of YAML 1.2, and which rejects duplicate keys.

    It reads 1e-6 as a number, and dates, 010 (octal in YAML 1.1) and 1:30 (base 60 there) as texts. Of YAML 1.1 it has
    merge keys, the booleans yes, no, on and off, and 1_000.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 -- PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in AMBIGUOUS_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Compose a mapping; before its merge keys are resolved, because merged keys may be overridden."""
        node = super().compose_mapping_node(anchor)
        assert node is not None
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # SafeLoader rejects it
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        r"""Return the text of a scalar, with pairs of escapes such as \ud83d\ude00 as one character, as in JSON."""
        text = super().construct_scalar(node)
        assert isinstance(text, str)
        try:
            return join_surrogates(text) if has_surrogate(text) else text
        except UnicodeDecodeError as e:
            raise yaml.constructor.ConstructorError(
                None, None, "a text has an unpaired surrogate, such as \\ud800, which is no character", node.start_mark
            ) from e


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes the strings that `_Loader` would read as numbers."""


for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(f"{TAG}int", INTEGER, list("-+0123456789"))
    _resolver.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+.0123456789"))
for _name in ("merge", "value", "timestamp"):  # `<<` and `=` as values, and !!timestamp, are texts
    _Loader.add_constructor(f"{TAG}{_name}", _Loader.construct_scalar)


def load_config[C: Section](
    kind: type[C],
    path: str | Path,
    overrides: list[str] | None = None,
    *,
    slots: tuple[int, int] | None = None,
) -> C:
    """Load a configuration of type `kind` from `path`, with `overrides` ("a.b=c", the value in YAML) applied in order.

    Args:
        slots: (nodes, slots per node), used where neither the file nor an override sets one of them.

    Raises:
        ConfigError: missing file, invalid YAML, unknown or missing keys, invalid values; lists all problems, one per
            line.
    """
    return make_config(kind, read_tree(path), overrides, origin=str(path), slots=slots)


def read_tree(path: str | Path) -> dict[str, object]:
    """Read a YAML file with a mapping at the top; an empty file is an empty mapping.

    Raises:
        ConfigError: the file is missing, not valid YAML, or not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the configuration: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not valid UTF-8 at byte {e.start}") from e
    tree = parse_yaml(text, str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: needs a mapping at the top level, got {type(tree).__name__}")
    return tree


def make_config[C: Section](
    kind: type[C],
    tree: dict[str, object],
    overrides: Sequence[str] | None = None,
    *,
    origin: str | None = None,
    slots: tuple[int, int] | None = None,
    is_record: bool = False,
) -> C:
    """Make a configuration of type `kind` from `tree`, with `overrides` ("a.b=c", the value in YAML) applied in order.

    Args:
        tree: parsed YAML; modified by the overrides.
        origin: prefix of error messages, such as the file's path.
        slots: as in `load_config`.
        is_record: whether `tree` is from `dump_config`, perhaps of an earlier version: keys of `FIXED_KEYS` may have
            the values that are fixed.

    Raises:
        ConfigError: unknown or missing keys, invalid values; lists all problems, one per line.
    """
    for override in overrides or []:
        _apply_override(tree, override)
    if slots is not None:
        _set_default_slots(tree, slots)
    try:
        return kind.model_validate(tree)
    except ValidationError as e:
        if is_record and _delete_fixed_keys(tree, e):
            return make_config(kind, tree, origin=origin)
        start = f"{origin}: " if origin else ""
        raise ConfigError("\n".join(f"{start}{line}" for line in _format_errors(e, kind, tree))) from e


def dump_config(config: Section) -> str:
    """Format the resolved configuration as YAML, with all defaults written out."""
    text = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)
    assert isinstance(text, str)
    return text


def format_value(value: object) -> str:
    """Format a value as YAML in one line, as `load_config` reads it."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=1_000_000)
    assert isinstance(text, str)
    return text.removesuffix("...\n").strip()


def parse_yaml(text: str, origin: str) -> object:
    """Return the value of a YAML document.

    Args:
        origin: the file or option that the text is from, for messages.

    Raises:
        ConfigError: the text is not valid YAML; names the line.
    """
    try:
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 -- a SafeLoader
        json.dumps(tree, default=str, skipkeys=True)  # raises ValueError if an alias makes a value contain itself
    except yaml.MarkedYAMLError as e:
        at = f":{e.problem_mark.line + 1}" if e.problem_mark else ""
        raise ConfigError(f"{origin}{at}: not valid YAML: {e.problem}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # characters that YAML forbids, numbers of 5,000 digits
        raise ConfigError(f"{origin}: not valid YAML: {str(e).splitlines()[0]}") from e
    return tree


def find_leaves(text: str, origin: str) -> Iterator[tuple[str, object, int]]:
    """Yield (dotted key, value, line) of each value of a YAML mapping that is no mapping itself, or an empty one.

    Raises:
        ConfigError: the text is not valid YAML, or not a mapping.
    """
    tree = parse_yaml(text, origin)
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{origin}: needs a mapping at the top level, got {type(tree).__name__}")
    node = yaml.compose(text, Loader=_Loader)
    if isinstance(node, yaml.MappingNode):
        yield from _find_leaves(node, tree or {}, "")


def _find_leaves(node: yaml.MappingNode, tree: Mapping[Any, object], prefix: str) -> Iterator[tuple[str, object, int]]:
    lines = {key.value: (key.start_mark.line + 1, value) for key, value in node.value}
    for name, value in tree.items():
        line, below = lines.get(str(name), (node.start_mark.line + 1, None))
        if isinstance(value, dict) and value and isinstance(below, yaml.MappingNode):
            yield from _find_leaves(below, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, line


def _apply_override(tree: dict[str, object], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: needs the form key.path=value")
    *parents, leaf = key.strip().split(".")
    node = tree
    for depth, parent in enumerate(parents):
        below = node.get(parent)
        if below is None:
            below = node[parent] = {}
        if not isinstance(below, dict):
            raise ConfigError(
                f"--set {override}: {'.'.join(parents[: depth + 1])} is of type {type(below).__name__}, not a section"
            )
        node = below
    node[leaf] = parse_yaml(value, f"--set {override}")


def _set_default_slots(tree: dict[str, object], slots: tuple[int, int]) -> None:
    placement = tree.get("placement", {})
    if isinstance(placement, dict) and not placement.keys() & {"nodes", "slots_per_node"}:
        nodes, per_node = slots
        tree["placement"] = {**placement, "nodes": nodes, "slots_per_node": per_node}


def _delete_fixed_keys(tree: dict[str, object], error: ValidationError) -> bool:
    """Delete the unknown keys that are in `FIXED_KEYS` with the same value; return whether there were any."""
    found = False
    for problem in error.errors(include_url=False):
        if problem["type"] == "extra_forbidden":
            path = _yaml_path(problem["loc"], tree, missing=False)
            fixed = _find_fixed(".".join(path))
            if fixed is not None and fixed[0] == problem["input"]:
                reduce(getitem, path[:-1], cast("Any", tree)).pop(path[-1])
                found = True
    return found


def _find_fixed(key: str) -> tuple[object, str] | None:
    return next((fixed for pattern, fixed in FIXED_KEYS.items() if fnmatchcase(key, pattern)), None)


def _format_errors(error: ValidationError, kind: type[Section], tree: dict[str, object]) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        missing = problem["type"] == "missing"
        where = ".".join(_yaml_path(problem["loc"], tree, missing=missing)) or kind.__name__
        match problem["type"]:
            case "extra_forbidden":
                fixed = _find_fixed(where)
                line = (
                    f"{where}: unknown key"
                    if fixed is None
                    else f"{where} is no longer an option: it is fixed at {fixed[1]}"
                )
            case "missing":
                line = f"{where}: this key is required"
            case "value_error":
                line = f"{where}: {problem['ctx']['error']}"
            case "model_type":
                line = f"{where}: needs a mapping, got {problem['input']!r}"
            case "union_tag_invalid":
                line = f"{where}.type: needs one of {problem['ctx']['expected_tags']}, got {problem['ctx']['tag']!r}"
            case _:
                line = f"{where}: {problem['msg']}, got {problem['input']!r}"
        lines.append(line)
    return lines


def _yaml_path(loc: tuple[int | str, ...], tree: dict[str, object], *, missing: bool) -> list[str]:
    """Return the path `loc` as it is in the file, without the union tags that pydantic inserts after a union's key."""
    path: list[str] = []
    node: object = tree
    for i, part in enumerate(loc):
        absent_key = missing and i == len(loc) - 1
        if isinstance(node, dict) and part not in node and not absent_key:
            continue
        path.append(str(part))
        node = None if absent_key or not isinstance(node, dict | list) else node[part]  # type: ignore[index]
    return path
