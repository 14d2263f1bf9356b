"""JSON Schema of the configuration of each training command, for editors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from megarl.config import STAGES
from megarl.config.algorithms.policy import PolicyConfig

JsonObject = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def make_schema(command: str) -> JsonObject:
    """Return the JSON Schema of the configuration of `megarl COMMAND`; every key has a description.

    Args:
        command: a key of `STAGES`.
    """
    kind = STAGES[command]
    schema = kind.model_json_schema()
    definitions: JsonObject = schema["$defs"]
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


def _properties(target: JsonObject) -> JsonObject:
    """Return the properties of a section, which may be the first alternative to a plain value."""
    found: JsonObject = target.get("properties") or target["anyOf"][0]["properties"]
    return found


def _describe_algorithm(section: type[PolicyConfig], target: JsonObject) -> None:
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
