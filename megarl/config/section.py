"""Base class of all configuration sections."""

from __future__ import annotations

import importlib
import os
import re
import sys
import typing
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain
from types import ModuleType, NoneType
from typing import Annotated, Any, TypeAlias, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from megarl.errors import ConfigError
from megarl.text import describe_error
from megarl.user_code import outcome_of

_recorded: ContextVar[dict[str, str] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded_imports() -> Iterator[dict[str, str]]:
    """Yield a dict that gets each import path outside megarl that the block loads, under its configuration key.

    Importing a module executes it.
    """
    paths: dict[str, str] = {}
    reset = _recorded.set(paths)
    try:
        yield paths
    finally:
        _recorded.reset(reset)


def load_object(path: str, *, key: str, kind: str) -> object:
    """Import the object at `package.module:name`; also finds modules in the working directory.

    Args:
        path: the import path.
        key: YAML path of the option, for error messages.
        kind: what the option names, for error messages: "function".

    Raises:
        ConfigError: the path is malformed, the module cannot be imported, or it has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{key} needs package.module:{kind}, got {path!r}")
    recorded = _recorded.get()
    if recorded is not None and module_name.partition(".")[0] != __name__.partition(".")[0]:
        recorded[key] = path
    module = _import(module_name, key)
    if not hasattr(module, name):
        raise ConfigError(f"{key}: module {module_name} ({module.__file__}) has no {name!r}")
    return getattr(module, name)


def load_class(path: str, *, key: str) -> type:
    """Import the class at `package.module:name`, as `load_object`.

    Raises:
        ConfigError: as `load_object`, or the object is no class.
    """
    found = load_object(path, key=key, kind="Class")
    if not isinstance(found, type):
        raise ConfigError(f"{key} needs a class, got {path}, a {type(found).__name__}")
    return found


def _import(name: str, key: str) -> ModuleType:
    # A console script does not search the working directory, where a user's rewards.py is. The directory is appended,
    # and only when needed, so that it never shadows an installed package.
    module, error = outcome_of(partial(importlib.import_module, name))
    if error is None:
        return cast("ModuleType", module)
    if not isinstance(error, ModuleNotFoundError):
        raise ConfigError(f"{key}: importing {name} raised {describe_error(error)}") from error
    here = os.getcwd()
    if not _is_module_or_parent(error.name, name) or here in sys.path:
        raise ConfigError(f"{key}: cannot import {name}: {error}") from error
    sys.path.append(here)
    return _import(name, key)


def _is_module_or_parent(missing: str | None, name: str) -> bool:
    """Whether the missing module is `name` or one of its parent packages, and not a module that `name` imports."""
    return missing is not None and f"{name}.".startswith(f"{missing}.")


def expand_home(path: str) -> str:
    """Return the path with the home folder in the place of a leading `~` or `~user`.

    Raises:
        ValueError: the home folder is not known.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        name = path.partition("/")[0]
        raise ValueError(f"the home folder of {name} is not known; write ./{name} for a file of this name")
    return expanded


FilePath: TypeAlias = Annotated[str, AfterValidator(expand_home)]
"""Path of a file or folder, with the home folder in the place of a leading `~`."""

Seed: TypeAlias = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Seed of random generators: torch takes 64 bits, and Megatron adds ranks to it."""

OCTAL = re.compile(r"[-+]?0[0-9_]+")
"""A whole number that YAML 1.1 reads as octal, or as text, and YAML 1.2 as decimal."""


class Section(BaseModel):
    """A frozen section of the configuration; unknown keys are errors. The docstring below a field documents it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _require_numbers(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what pydantic would convert to another number than is meant: booleans, and texts such as 010."""
        assert info.field_name is not None
        if takes_numbers_only(cls.model_fields[info.field_name].annotation):
            for each in _leaves(value):
                if isinstance(each, bool):
                    raise ValueError(f"needs a number, got {each}, which YAML also reads from yes, no, on and off")  # noqa: TRY004 -- pydantic's
                if isinstance(each, str) and OCTAL.fullmatch(each.strip()):
                    raise ValueError(f"needs a number without leading zeros, which may mean octal, got {each}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_partial_sections(cls, data: object) -> object:
        """Fill subsections that are given in part with the field's own default, which may differ from the class's."""
        if not isinstance(data, dict):
            return data
        out = dict(data)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section) and isinstance(data.get(name), dict):
                out[name] = merge(field.default.model_dump(exclude_unset=True), data[name])
        return out


def takes_numbers_only(annotation: Any) -> bool:
    """Return whether a field of this type takes numbers, or containers of numbers, and neither booleans nor texts.

    Examples:
        >>> takes_numbers_only(float | None), takes_numbers_only(dict[str, list[int]]), takes_numbers_only(bool | int)
        (True, True, False)
    """
    parts = get_args(annotation)
    if not parts:
        return annotation in (int, float)
    match get_origin(annotation):
        case typing.Annotated:
            parts = parts[:1]
        case origin if isinstance(origin, type) and issubclass(origin, Mapping):
            parts = parts[1:]
        case _:
            parts = tuple(p for p in parts if p not in (NoneType, ...) and get_origin(p) is not typing.Literal)
    return bool(parts) and all(map(takes_numbers_only, parts))


def _leaves(value: object) -> Iterator[object]:
    """Yield a value, or the values in containers of any depth."""
    match value:
        case dict():
            yield from chain.from_iterable(map(_leaves, value.values()))
        case list() | tuple():
            yield from chain.from_iterable(map(_leaves, value))
        case _:
            yield value


def merge(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Merge two trees recursively; the values of `given` win."""
    out = {**defaults, **given}
    for key in defaults.keys() & given.keys():
        if isinstance(defaults[key], dict) and isinstance(given[key], dict):
            out[key] = merge(cast("Mapping[str, object]", defaults[key]), cast("Mapping[str, object]", given[key]))
    return out


def discriminate_by_type(default: str) -> Discriminator:
    """Make a discriminator that chooses a union's member by the key `type`; a missing `type` means `default`."""

    def tag(value: object) -> Hashable:
        return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)

    return Discriminator(tag)
