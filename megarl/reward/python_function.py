"""Loads rewards of the user, functions or classes, by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

from megarl.config.import_path import load_object
from megarl.config.reward import PythonRewardConfig
from megarl.errors import ConfigError, RewardError
from megarl.text import describe_error
from megarl.user_code import outcome_of

RewardFunction: TypeAlias = Callable[..., object]
"""`(trajectory, text, row) -> result`, sync or async; `(trajectories, texts, row) -> results` with `per: group`.

`text`: the sampled completion; `row`: the prompt's data row.
"""

ARGUMENTS = {"sample": ("trajectory", "text", "row"), "group": ("trajectories", "texts", "row")}
"""Positional arguments that a reward is called with, by the configuration's `per`."""


@dataclass(frozen=True, slots=True)
class PythonReward:
    """A reward of the user, ready to be called."""

    function: RewardFunction
    is_async: bool
    """Whether calling the function returns a coroutine."""
    close: Callable[[], object] | None = None
    """Method `close` of a class, sync or async; None if there is none."""


def load_reward(config: PythonRewardConfig, *, key: str) -> PythonReward:
    """Import the reward of a term, and create it if it is a class; also finds modules in the working directory.

    Args:
        config: the term.
        key: YAML path of the term, for error messages.

    Raises:
        ConfigError: as `check_reward`.
        RewardError: the constructor of the class raised an exception.
    """
    target = check_reward(config, key=key)
    if not isinstance(target, type):
        return PythonReward(partial(target, **config.kwargs), is_async=_is_async(target))
    instance: Any
    instance, error = outcome_of(partial(target, **config.kwargs))
    if error is not None:
        raise RewardError(f"{key} ({config.path}) cannot be created: {describe_error(error)}") from error
    return PythonReward(instance.score, is_async=_is_async(instance.score), close=getattr(instance, "close", None))


def check_reward(config: PythonRewardConfig, *, key: str) -> Any:
    """Import the function or class of a term and check its signature, without calling it. Return it.

    Args:
        config: the term.
        key: YAML path of the term, for error messages.

    Raises:
        ConfigError: it does not exist, or cannot be called with the arguments of `per` and with `kwargs`.
    """
    path_key = f"{key}.path"
    target = load_object(config.path, key=path_key, kind="function")
    if not callable(target):
        raise ConfigError(f"{path_key} needs a function or a class, got {config.path} = {target!r}")
    arguments = ARGUMENTS[config.per]
    if not isinstance(target, type):
        _check_call(target, arguments, config.kwargs, path=config.path, key=key)
        return target
    score = getattr(target, "score", None)
    if not callable(score):
        raise ConfigError(
            f"{path_key} needs a class with a method score({', '.join(arguments)}), {config.path} has none"
        )
    _check_call(target, (), config.kwargs, path=config.path, key=key)
    takes_self = isinstance(inspect.getattr_static(target, "score"), FunctionType)
    _check_call(score, ("self", *arguments) if takes_self else arguments, {}, path=f"{config.path}.score", key=key)
    return target


def _is_async(function: RewardFunction) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 -- an object's __call__ may be the async one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _check_call(
    function: Callable[..., object], arguments: tuple[str, ...], kwargs: Mapping[str, object], *, path: str, key: str
) -> None:
    """Check that `function(*arguments, **kwargs)` fits the signature of the function.

    Raises:
        ConfigError: it does not; names the key `path` or `kwargs` of the term `key`.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature
        return
    needed = f"{key}.path needs a function of ({', '.join(arguments)}), got {path}{signature}"
    try:
        signature.bind_partial(*arguments)
    except TypeError as e:
        raise ConfigError(f"{needed}: {e}") from e
    parameters = list(signature.parameters.values())
    taken = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: len(arguments)]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken]
    names = [p.name for p in named]
    for name in kwargs:
        if name not in names and not any(p.kind == p.VAR_KEYWORD for p in parameters):
            raise ConfigError(f"{key}.kwargs: {path} has no option {name!r}, it has {', '.join(names) or 'none'}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in kwargs:
            raise ConfigError(f"{key}.kwargs: {path} needs a value for {parameter.name!r}, which has no default")
    try:
        signature.bind(*arguments, **kwargs)
    except TypeError as e:
        raise ConfigError(f"{needed}: {e}") from e
