"""`megarl schema`: print the JSON Schema of a command's configuration, for editors, or a reference of its keys.

The reference is Markdown, made from the JSON Schema.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from megarl.config import STAGES
from megarl.config.policy import PolicyConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `COMMAND [--markdown]`: the command whose configuration is described, and the format."""
    parser.add_argument("command", choices=tuple(STAGES), metavar="COMMAND", help=f"one of {', '.join(STAGES)}")
    parser.add_argument(
        "--markdown", action="store_true", help="print a reference of all keys as Markdown instead of the schema"
    )


def run(args: argparse.Namespace) -> int:
    """Print the schema as JSON, or the reference as Markdown."""
    if args.markdown:
        print(make_reference(args.command))
        return 0
    print(json.dumps(make_schema(args.command), indent=2))
    return 0


Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def make_schema(command: str) -> Schema:
    """Return the JSON Schema of the configuration of `megarl COMMAND`; every key has a description.

    Args:
        command: a key of `STAGES`.
    """
    kind = STAGES[command]
    schema = kind.model_json_schema()
    definitions: Schema = schema["$defs"]
    for section in {kind, *_sections_below(kind)}:
        target = schema if section is kind else definitions.get(section.__name__)
        if target is None:
            continue
        for name, property_schema in _properties(target).items():
            property_schema.pop("title", None)
            if "description" not in property_schema:
                property_schema["description"] = _description(section, name)
        if issubclass(section, PolicyConfig):
            _describe_algorithm(section, target)
    return {"$schema": DIALECT, **schema, "title": f"Configuration of megarl {command}"}


def _properties(target: Schema) -> Schema:
    """Return the properties of a section, which may be the first alternative to a plain value."""
    found: Schema = target.get("properties") or target["anyOf"][0]["properties"]
    return found


def _describe_algorithm(section: type[PolicyConfig], target: Schema) -> None:
    kind = section.model_fields["type"].default
    if not isinstance(kind, str):  # the base class stands for algorithms outside the package
        target["properties"]["type"]["pattern"] = ":"
        target["additionalProperties"] = True
    else:
        target["properties"]["type"]["const"] = kind
        if kind != "grpo":
            target["required"] = sorted({*target.get("required", ()), "type"})


def _description(section: type[BaseModel], name: str) -> str:
    """Return the description of a field: that of a base class, or of the section that is its value."""
    for base in section.__mro__[1:]:
        if issubclass(base, BaseModel) and name in base.model_fields and base.model_fields[name].description:
            return str(base.model_fields[name].description)
    if name == "type":
        return f"Chooses this kind of section: {inspect.getdoc(section)}"
    for found in _models_in(section.model_fields[name].annotation):
        return str(inspect.getdoc(found)).split("\n\n")[0]
    raise AssertionError(f"{section.__name__}.{name} has no description")


def _sections_below(kind: type[BaseModel]) -> set[type[BaseModel]]:
    """Return all sections that the fields of `kind` may hold, at any depth."""
    found: set[type[BaseModel]] = set()
    pending = [kind]
    while pending:
        for field in pending.pop().model_fields.values():
            for section in _models_in(field.annotation):
                if section not in found:
                    found.add(section)
                    pending.append(section)
    return found


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


JsonObject = Mapping[str, Any]

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

MAP_KEY = "NAME"
"""Stands for the keys of a mapping that the user chooses, such as the names of reward terms."""

ITEM_KEY = "NUMBER"
"""Stands for the number of a section in a list of them, counted from 0."""

IMPORT_PATH = "package.module:Class"
"""Stands for the type of an algorithm outside the package."""


def make_reference(command: str) -> str:
    """Return a Markdown page with every key of the configuration of `megarl COMMAND`.

    Each key has the anchor of its path, such as `trainer.optimizer.lr`. A key of a section that `type` chooses has the
    type in its anchor, `algorithm.ppo.critic`, unless all types have it: `algorithm.group_size`.

    Args:
        command: a key of `STAGES`.
    """
    return _Page(make_schema(command)).write(command)


class _Page:
    """The sections of one schema, in the order of the page."""

    def __init__(self, schema: JsonObject) -> None:
        self._schema = schema
        self._paths: dict[str, list[str]] = {}
        """Name of a section's definition -> the paths that have such a section; the first one is its anchor."""

        self._written: set[str] = set()

    def write(self, command: str) -> str:
        top = self._schema["properties"]
        plain = {name: value for name, value in top.items() if not list(self._refs(value))}
        lines = [
            f"# Keys of `megarl {command}`\n",
            f"All keys of the configuration of `megarl {command}`, with type, default and description. "
            "Keys without a default are required.\n",
            "## Top level\n",
        ]
        lines += [self._entry(name, name, value) for name, value in plain.items()]
        for name, value in top.items():
            if name not in plain:
                self._find_sections(name, value)
        for name, value in top.items():
            if name not in plain:
                lines += self._sections(name, value, level=2)
        return "\n".join(lines)

    def _find_sections(self, path: str, node: JsonObject) -> None:
        for reference in self._refs(node):
            at = self._path_of_sections(path, node)
            paths = self._paths.setdefault(reference, [])
            if at not in paths:
                paths.append(at)
                for name, value in self._properties(reference).items():
                    self._find_sections(f"{at}.{name}", value)

    def _path_of_sections(self, path: str, node: JsonObject) -> str:
        """Return the path of the section at `path`, or of those in a mapping or list there."""
        if "items" in node:
            return f"{path}.{ITEM_KEY}"
        return f"{path}.{MAP_KEY}" if "additionalProperties" in node else path

    def _sections(self, path: str, node: JsonObject, level: int) -> Iterator[str]:
        """Yield the section or sections at `path`, then those below."""
        at_path = (path, self._path_of_sections(path, node))
        references = [r for r in self._refs(node) if self._paths[r][0] in at_path and r not in self._written]
        if not references:
            return
        self._written.update(references)
        at = self._paths[references[0]][0]
        yield f"{'#' * level} `{at}` {{ #{at} }}\n"
        shared: JsonObject = {}
        if len(references) > 1:
            yield f"{node['description']} `type` chooses the keys:\n"
            yield "".join(f"- [`{self._type(r)}`](#{self._anchor(r)}): {self._summary(r)}\n" for r in references)
            shared = self._shared_properties(references)
            if shared:
                yield "Every type has these keys:\n"
                yield from self._entries(at, shared, references)
        for reference in references:
            if len(references) > 1:
                title = f"`{at}` with `type: {self._type(reference)}`"
                yield f"{'#' * (level + 1)} {title} {{ #{self._anchor(reference)} }}\n"
            yield f"{self._description(reference)}\n"
            others = self._paths[reference][1:]
            if others:
                yield f"The same keys: {', '.join(f'`{other}`' for other in others)}.\n"
            own = {name: value for name, value in self._properties(reference).items() if name not in shared}
            yield from self._entries(self._anchor(reference), own, [reference])
        for reference in references:
            for name, value in self._properties(reference).items():
                yield from self._sections(f"{at}.{name}", value, min(level + 1, 4))

    def _entries(self, anchor: str, properties: JsonObject, references: list[str]) -> Iterator[str]:
        for name, value in properties.items():
            yield self._entry(name, f"{anchor}.{name}", value)
            if len(references) > 1:
                yield from self._defaults_by_type(name, value, references)

    def _entry(self, name: str, anchor: str, value: JsonObject) -> str:
        """Return a definition: key, type and default; then the description."""
        has_heading = any(paths[0] == anchor for paths in self._paths.values())
        parts = [f"`{name}`" if has_heading else f"`{name}`{{ #{anchor} }}", self._type_text(value)]
        default = self._default_text(value)
        if default is not None:
            parts.append(f"default {default}")
        elif not self._is_section(value):
            parts.append("required")
        description = "Selects these keys." if "const" in value else value["description"]
        return f"{', '.join(parts)}\n:   {textwrap.indent(description, '    ').lstrip()}\n"

    def _defaults_by_type(self, name: str, value: JsonObject, references: list[str]) -> Iterator[str]:
        usual = self._default_text(value)
        own = {r: self._default_text(self._properties(r)[name]) for r in references}
        groups: dict[str, list[str]] = {}
        for reference, default in own.items():
            if default != usual and default is not None:
                groups.setdefault(default, []).append(f"`{self._type(reference)}`")
        if groups:
            texts = [f"{default} for {', '.join(types)}" for default, types in groups.items()]
            yield f"    Other defaults: {'; '.join(texts)}.\n"

    def _shared_properties(self, references: list[str]) -> JsonObject:
        """Return the properties that are equal in all sections, except for their defaults."""

        def common(name: str) -> bool:
            found = [self._properties(reference).get(name) for reference in references]
            first = _without_default(found[0])
            return all(each is not None and _without_default(each) == first for each in found)

        named = self._properties(references[0])
        return {name: value for name, value in named.items() if name != "type" and common(name)}

    def _type_text(self, node: JsonObject) -> str:
        """Return what values a key takes, in words."""
        if "$ref" in node:
            alternatives = self._definition(node).get("anyOf", [])  # to a section: a plain value
            return " or ".join([self._link(node), *map(self._type_text, alternatives[1:])])
        if "anyOf" in node:
            return " or ".join(self._type_text(each) for each in node["anyOf"])
        if "oneOf" in node:
            return f"[section](#{self._paths[next(self._refs(node))][0]}) chosen by `type`"
        if "const" in node:
            return f"`{node['const']}`"
        if "enum" in node:
            return "one of " + ", ".join(f"`{value}`" for value in node["enum"])
        match node.get("type"):
            case "array":
                return f"list of {self._type_text(node['items'])}"
            case "object":
                values = node.get("additionalProperties")
                return f"map from name to {self._type_text(values)}" if isinstance(values, Mapping) else "map"
            case "null":
                return "null"
            case kind:
                bounds = [f"{sign} {_yaml(node[word])}" for word, sign in BOUNDS.items() if word in node]
                return " ".join([str(kind or "any value"), *([" and ".join(bounds)] if bounds else [])])

    def _default_text(self, node: JsonObject) -> str | None:
        if "default" not in node:
            return None
        default = node["default"]
        if self._is_section(node):
            if "$ref" in node and isinstance(default, dict):
                own = {name: value.get("default") for name, value in self._properties(_name_of(node["$ref"])).items()}
                default = _difference(default, own)
            elif "oneOf" in node:
                default = {"type": default["type"]}
            return f"`{_yaml(default)}`" if default else None
        return f"`{_yaml(default)}`"

    def _link(self, node: JsonObject) -> str:
        return f"[section](#{self._paths[_name_of(node['$ref'])][0]})"

    def _is_section(self, node: JsonObject) -> bool:
        return "$ref" in node or "oneOf" in node

    def _refs(self, node: JsonObject) -> Iterator[str]:
        """Yield the names of the sections that a key may hold, as its value or in a mapping or list."""
        if "$ref" in node:
            yield _name_of(node["$ref"])
        for key in ("anyOf", "oneOf"):
            for each in node.get(key, ()):
                yield from self._refs(each)
        for key in ("additionalProperties", "items"):
            if isinstance(node.get(key), Mapping):
                yield from self._refs(node[key])

    def _definition(self, node: JsonObject) -> JsonObject:
        found: JsonObject = self._schema["$defs"][_name_of(node["$ref"])]
        return found

    def _properties(self, reference: str) -> JsonObject:
        definition = self._schema["$defs"][reference]
        found: JsonObject = definition.get("properties") or definition["anyOf"][0]["properties"]
        return found

    def _description(self, reference: str) -> str:
        return str(self._schema["$defs"][reference]["description"])

    def _summary(self, reference: str) -> str:
        return self._description(reference).partition("\n\n")[0].replace("\n", " ")

    def _type(self, reference: str) -> str:
        kind = self._properties(reference)["type"]
        return str(kind.get("const") or kind.get("default") or IMPORT_PATH)

    def _anchor(self, reference: str) -> str:
        """Return the anchor of a section; sections that `type` chooses share the path and differ in the type."""
        path = self._paths[reference][0]
        is_chosen = sum(paths[0] == path for paths in self._paths.values()) > 1
        return f"{path}.{self._type(reference).replace(IMPORT_PATH, 'Class')}" if is_chosen else path


def _name_of(reference: str) -> str:
    return reference.rpartition("/")[2]


def _without_default(node: JsonObject | None) -> JsonObject:
    return {key: value for key, value in (node or {}).items() if key != "default"}


def _difference(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `given` that differ from `defaults`."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        usual = defaults.get(name)
        if isinstance(value, dict) and isinstance(usual, dict):
            if below := _difference(value, usual):
                found[name] = below
        elif value != usual:
            found[name] = value
    return found


def _yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
