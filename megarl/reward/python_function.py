"""Loads reward functions of the user by import path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

from megarl.batch.trajectory import Trajectory
from megarl.errors import ConfigError

RewardFunction: TypeAlias = Callable[[Trajectory, str, Mapping[str, Any]], float | Awaitable[float]]
"""`(trajectory, text, row) -> float`, sync or async. `text`: the sampled completion; `row`: the prompt's data row."""


def load_reward_function(path: str, *, key: str) -> RewardFunction:
    """Import the function at `package.module:function`; also finds modules in the working directory.

    Args:
        path: the import path.
        key: YAML path of the option, for error messages.

    Raises:
        ConfigError: the module or function does not exist, or is not callable with three positional arguments.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{key} needs package.module:function, got {path!r}")
    module = _import(module_name, key)
    if not hasattr(module, name):
        raise ConfigError(f"{key}: module {module_name} ({module.__file__}) has no {name!r}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{key} needs a function, got {path} = {function!r}")
    _check_signature(function, path, key)
    return function  # type: ignore[no-any-return]


def is_async(function: RewardFunction) -> bool:
    """Whether calling the function returns a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004 -- an object's __call__ may be the async one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


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


def _check_signature(function: Callable[..., object], path: str, key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature
        return
    try:
        signature.bind(None, None, None)
    except TypeError as e:
        raise ConfigError(f"{key} needs a function of (trajectory, text, row), got {path}{signature}: {e}") from e
