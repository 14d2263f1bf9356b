"""Loads rewards of the user, functions or classes, by import path."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np

from megarl.batch.trajectory import Prompt
from megarl.config.reward import PythonRewardConfig
from megarl.config.section import load_object
from megarl.errors import ConfigError, RewardError
from megarl.reward.terms import CallThreads, Completion, TermError, TermValue, abbreviate, quote, read_result
from megarl.text import describe_error
from megarl.user_code import await_outcome, outcome_of

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


logger = logging.getLogger(__name__)

MAX_THREADS = 32
"""Maximum number of concurrent calls of a sync reward, per term."""


class PythonTerm:
    """Calls a reward of the user with a timeout and checks what it returns."""

    def __init__(self, name: str, config: PythonRewardConfig) -> None:
        """Load the reward; raises as `load_reward`."""
        self._label = f"reward.terms.{name} ({config.path})"
        self._config = config
        self._reward = load_reward(config, key=f"reward.terms.{name}")
        self._threads = CallThreads(self._label, MAX_THREADS)

    @property
    def compares_completions(self) -> bool:
        """Whether the function sees all completions of a prompt; as `Term`."""
        return self._config.per == "group"

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Call the reward for each completion or once for all, as `per` says; as `Term`."""
        if self._config.per == "group":
            return await self._score_group(completions, prompt)
        return await asyncio.gather(*(self._score_sample(completion, prompt) for completion in completions))

    async def _score_sample(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        where = quote(completion, prompt)
        value = await self._call(where, completion.trajectory, completion.text, prompt.row)
        return value if isinstance(value, TermError) else read_result(self._label, value, where)

    async def _score_group(self, completions: Sequence[Completion], prompt: Prompt) -> list[TermValue | TermError]:
        num = len(completions)
        where = f"on the {num} completions of {prompt.prompt_id}"
        values = await self._call(where, [c.trajectory for c in completions], [c.text for c in completions], prompt.row)
        if isinstance(values, TermError):
            return [values] * num
        if isinstance(values, np.ndarray):
            values = list(values) if values.ndim else values.item()
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != num:
            got = f"{type(values).__name__} {abbreviate(values)}"
            return [TermError(f"{self._label} returned {got}, not a sequence of {num} results, {where}")] * num
        return [read_result(self._label, v, quote(c, prompt)) for v, c in zip(values, completions, strict=True)]

    async def _call(self, where: str, *arguments: object) -> object | TermError:
        """Return what the reward returns, or a `TermError` if it raises or times out."""
        call, seconds = partial(self._reward.function, *arguments), self._config.timeout_seconds
        value: object
        try:
            if self._reward.is_async:
                value, error = await asyncio.wait_for(await_outcome(call), seconds)
            else:
                value, error = await self._threads.run(call, seconds)
        except TimeoutError:
            return TermError(f"{self._label} took longer than timeout_seconds = {seconds:g} {where}")
        if error is not None:
            failure = TermError(f"{self._label} raised {describe_error(error)} {where}")
            failure.__cause__ = error
            return failure
        return value

    async def close(self) -> None:
        """Call the `close` of the user's class, if it has one; logs a warning if it fails."""
        if self._reward.close is None:
            return
        seconds = self._config.timeout_seconds
        try:
            if inspect.iscoroutinefunction(self._reward.close):
                _, error = await asyncio.wait_for(await_outcome(self._reward.close), seconds)
            else:
                _, error = await self._threads.run(self._reward.close, seconds)
        except TimeoutError:
            logger.warning("%s: close() took longer than timeout_seconds = %g", self._label, seconds)
            return
        if error is not None:
            logger.warning("%s: close() raised %s", self._label, describe_error(error))
