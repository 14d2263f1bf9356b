"""Import the objects that a configuration names by import path, such as reward functions, agents and model families."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from megarl.errors import ConfigError


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
    module = _import(module_name, key)
    if not hasattr(module, name):
        raise ConfigError(f"{key}: module {module_name} ({module.__file__}) has no {name!r}")
    return getattr(module, name)


def _import(name: str, key: str) -> ModuleType:
    # A console script does not search the working directory, where a user's rewards.py is. The directory is appended,
    # and only when needed, so that it never shadows an installed package.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        here = os.getcwd()
        if not _is_module_or_parent(e.name, name) or here in sys.path:
            raise ConfigError(f"{key}: cannot import {name}: {e}") from e
    except Exception as e:  # importing runs the user's code, which may raise anything
        raise ConfigError(f"{key}: importing {name} raised {type(e).__name__}: {e}") from e
    sys.path.append(here)
    return _import(name, key)


def _is_module_or_parent(missing: str | None, name: str) -> bool:
    """Whether the missing module is `name` or one of its parent packages, and not a module that `name` imports."""
    return missing is not None and f"{name}.".startswith(f"{missing}.")
