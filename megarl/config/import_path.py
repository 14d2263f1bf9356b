"""Import the objects that a configuration names by import path, such as reward functions, agents and model families."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import cast

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
