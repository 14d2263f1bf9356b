"""Computes the reward of a trajectory: the value of every reward term, and their weighted sum."""

from __future__ import annotations

import asyncio
import math
import numbers
import re
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.reward import (
    FormatRewardConfig,
    ModelRewardConfig,
    NumericRewardConfig,
    PythonRewardConfig,
    RewardsConfig,
)
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError, RewardError
from megarl.reward.python_function import RewardFunction, is_async, load_reward_function
from megarl.reward.rules import fast_numeric_reward, format_reward, numeric_reward

RewardTerm: TypeAlias = Callable[[Trajectory, str, Prompt], Awaitable[float]]

CallOutcome: TypeAlias = tuple[object, BaseException | None]
"""The return value of a user's function, or the exception that it raised."""

MAX_THREADS = 32
"""Maximum number of concurrent calls of a sync reward function, per term."""

MAX_QUOTE_LENGTH = 300
"""Maximum number of characters of a completion that an error message quotes."""


class RewardScorer:
    """Scores trajectories by the rules and functions of `reward.terms`; reward models are evaluated elsewhere.

    Must be created in the process that uses it, because it loads the functions and the tokenizer.

    Raises:
        ConfigError: a term is invalid; the message names its YAML path.
    """

    def __init__(self, config: RewardsConfig, decode: Callable[[Sequence[int]], str]) -> None:
        """Create a scorer for the terms of `config`.

        Args:
            decode: turns sampled tokens into text without special tokens.
        """
        self._decode = decode
        rules = {name: term for name, term in config.terms.items() if not isinstance(term, ModelRewardConfig)}
        self._weights = {name: term.weight for name, term in rules.items()}
        self._terms = {name: _make_term(name, term) for name, term in rules.items()}

    @classmethod
    def from_model(cls, config: RewardsConfig, model_path: str) -> RewardScorer:
        """Return a scorer that decodes with the tokenizer in folder `model_path`.

        Raises:
            ConfigError: as the class.
            DataError: the tokenizer cannot be loaded.
        """
        # cleaning up spaces would change the text of the policy, and with it the result of a strict rule
        decode = partial(
            load_tokenizer(model_path).decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cls(config, decode)

    async def score(self, trajectory: Trajectory, prompt: Prompt) -> tuple[dict[str, float], float]:
        """Return the unweighted value of each term by name, and their weighted sum.

        Raises:
            RewardError: a term raised, timed out, or returned something other than a finite number.
        """
        text = self._decode(trajectory.token_ids[trajectory.loss_mask].tolist())
        rewards = {name: await term(trajectory, text, prompt) for name, term in self._terms.items()}
        return rewards, sum((self._weights[name] * value for name, value in rewards.items()), 0.0)


def _make_term(name: str, config: NumericRewardConfig | FormatRewardConfig | PythonRewardConfig) -> RewardTerm:
    match config:
        case NumericRewardConfig():
            return partial(_score_numeric, name, config)
        case FormatRewardConfig():
            key = f"reward.terms.{name}.pattern"
            try:
                return partial(_score_format, re.compile(config.pattern))
            except re.error as e:
                raise ConfigError(f"{key} needs a regular expression, got {config.pattern!r}: {e}") from e
        case PythonRewardConfig():
            function = load_reward_function(config.path, key=f"reward.terms.{name}.path")
            return _PythonRewardTerm(name, config, function)


async def _score_numeric(
    name: str, config: NumericRewardConfig, trajectory: Trajectory, text: str, prompt: Prompt
) -> float:
    if prompt.answer is None:
        raise RewardError(
            f"reward.terms.{name} (numeric) needs a reference answer (data.fields.answer), "
            f"but {prompt.prompt_id} has none"
        )
    rule = {"strict": config.strict, "finished": trajectory.finish_reason == "stop"}
    reward = fast_numeric_reward(text, prompt.answer, **rule)
    if reward is None:
        # in a thread, because math-verify may take two seconds; it has its own timeout
        reward = await asyncio.to_thread(numeric_reward, text, prompt.answer, **rule)
    return reward


async def _score_format(pattern: re.Pattern[str], trajectory: Trajectory, text: str, prompt: Prompt) -> float:
    return format_reward(text, pattern)


class _PythonRewardTerm:
    """Calls a user's function with a timeout and checks its return value."""

    def __init__(self, name: str, config: PythonRewardConfig, function: RewardFunction) -> None:
        self._label = f"reward.terms.{name} ({config.path})"
        self._timeout_seconds = config.timeout_seconds
        self._function = function
        self._threads = None if is_async(function) else asyncio.Semaphore(MAX_THREADS)

    async def __call__(self, trajectory: Trajectory, text: str, prompt: Prompt) -> float:
        on = f"on {prompt.prompt_id}, completion {_abbreviate(text)}"
        call = partial(self._function, trajectory, text, prompt.row)
        try:
            value, error = await self._call_with_timeout(call)
        except TimeoutError:
            raise RewardError(
                f"{self._label} took longer than timeout_seconds = {self._timeout_seconds:g} {on}"
            ) from None
        if error is not None:
            raise RewardError(f"{self._label} raised {_describe_error(error)} {on}") from error
        if not isinstance(value, numbers.Real | np.bool_):
            raise RewardError(f"{self._label} returned {type(value).__name__} {_abbreviate(value)}, not a number, {on}")
        if not math.isfinite(value):
            raise RewardError(f"{self._label} returned {value}, not a finite number, {on}")
        return float(value)

    async def _call_with_timeout(self, call: Callable[[], Any]) -> CallOutcome:
        if self._threads is None:
            return await asyncio.wait_for(_await_outcome(call()), self._timeout_seconds)
        async with self._threads:  # the time spent waiting here does not count towards the timeout
            return await asyncio.wait_for(_run_in_thread(call), self._timeout_seconds)


async def _await_outcome(coroutine: Awaitable[object]) -> CallOutcome:
    try:
        return await coroutine, None
    except (Exception, SystemExit) as e:  # noqa: BLE001 -- the user's code may raise anything
        return None, e


async def _run_in_thread(call: Callable[[], object]) -> CallOutcome:
    """Run `call` in a new daemon thread: a hung call in an executor would keep the process from exiting."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[CallOutcome] = loop.create_future()

    def finish(outcome: CallOutcome) -> None:
        if not done.done():  # the call may have timed out
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome: CallOutcome = (call(), None)
        except (Exception, SystemExit) as e:  # noqa: BLE001 -- the user's code may raise anything
            outcome = (None, e)
        with suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(finish, outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await done


def _describe_error(error: BaseException) -> str:
    """Return type, message and location of an exception as text, because tracebacks cannot be pickled."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} (at {frames[-1].filename}:{frames[-1].lineno})"


def _abbreviate(value: object) -> str:
    text = repr(value)
    return (
        text
        if len(text) <= MAX_QUOTE_LENGTH
        else f"{text[: MAX_QUOTE_LENGTH // 2]} ... {text[-MAX_QUOTE_LENGTH // 2 :]}"
    )
