"""Loads reward functions of the user by import path."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from megarl.batch.trajectory import Trajectory
from megarl.config.import_path import load_object
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
    function = load_object(path, key=key, kind="function")
    if not callable(function):
        raise ConfigError(f"{key} needs a function, got {path} = {function!r}")
    _check_signature(function, path, key)
    return function


def is_async(function: RewardFunction) -> bool:
    """Whether calling the function returns a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004 -- an object's __call__ may be the async one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _check_signature(function: Callable[..., object], path: str, key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature
        return
    try:
        signature.bind(None, None, None)
    except TypeError as e:
        raise ConfigError(f"{key} needs a function of (trajectory, text, row), got {path}{signature}: {e}") from e
