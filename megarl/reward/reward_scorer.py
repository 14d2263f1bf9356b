"""What a trajectory is worth: every reward term, and their weighted sum."""

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
from megarl.reward.rules import format_reward, numeric_reward, quick_numeric_reward

Term: TypeAlias = Callable[[Trajectory, str, Prompt], Awaitable[float]]

Outcome: TypeAlias = tuple[Any, BaseException | None]
"""What a user's function returned, or what it raised."""

MAX_THREADS = 32
"""Sync reward functions that run at once, per term."""

LONGEST_QUOTE = 300
"""Characters of a completion in an error message."""


class RewardScorer:
    """Scores trajectories by the rules of `reward.terms`; models are asked elsewhere.

    Built from plain configuration, in the process that uses it: functions and tokenizer are loaded there.

    Raises:
        ConfigError: a term that cannot work; the message names its YAML path.
    """

    def __init__(self, config: RewardsConfig, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` turns sampled tokens into text, special tokens left out."""
        self._decode = decode
        rules = {name: term for name, term in config.terms.items() if not isinstance(term, ModelRewardConfig)}
        self._weights = {name: term.weight for name, term in rules.items()}
        self._terms = {name: _build(name, term) for name, term in rules.items()}

    @classmethod
    def from_model(cls, config: RewardsConfig, model_path: str) -> RewardScorer:
        """A scorer that decodes with the tokenizer in folder `model_path`.

        Raises:
            ConfigError: as the class.
            DataError: the tokenizer cannot be loaded.
        """
        # Cleaning up spaces would change what the policy wrote, and with it what a strict rule sees.
        decode = partial(
            load_tokenizer(model_path).decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cls(config, decode)

    async def score(self, trajectory: Trajectory, prompt: Prompt) -> tuple[dict[str, float], float]:
        """Every rule's value before weighting, by name, and their weighted sum.

        Raises:
            RewardError: a term raised, timed out, or returned something other than a finite number.
        """
        text = self._decode(trajectory.token_ids[trajectory.loss_mask].tolist())
        rewards = {name: await term(trajectory, text, prompt) for name, term in self._terms.items()}
        return rewards, sum((self._weights[name] * value for name, value in rewards.items()), 0.0)


def _build(name: str, config: NumericRewardConfig | FormatRewardConfig | PythonRewardConfig) -> Term:
    match config:
        case NumericRewardConfig():
            return partial(_numeric, name, config)
        case FormatRewardConfig():
            key = f"reward.terms.{name}.pattern"
            try:
                return partial(_format, re.compile(config.pattern))
            except re.error as e:
                raise ConfigError(f"{key} needs a regular expression, got {config.pattern!r}: {e}") from e
        case PythonRewardConfig():
            function = load_reward_function(config.path, key=f"reward.terms.{name}.path")
            return _PythonTerm(name, config, function)


async def _numeric(name: str, config: NumericRewardConfig, trajectory: Trajectory, text: str, prompt: Prompt) -> float:
    if prompt.answer is None:
        raise RewardError(
            f"reward.terms.{name} (numeric) needs a reference answer (data.fields.answer), {prompt.prompt_id} has none"
        )
    rule = {"strict": config.strict, "finished": trajectory.finish_reason == "stop"}
    reward = quick_numeric_reward(text, prompt.answer, **rule)
    if reward is None:
        # In a thread, because math-verify may take two seconds; it is bounded by itself.
        reward = await asyncio.to_thread(numeric_reward, text, prompt.answer, **rule)
    return reward


async def _format(pattern: re.Pattern[str], trajectory: Trajectory, text: str, prompt: Prompt) -> float:
    return format_reward(text, pattern)


class _PythonTerm:
    """A user's function, with a limit on its time and a check on what it returns."""

    def __init__(self, name: str, config: PythonRewardConfig, function: RewardFunction) -> None:
        self._label = f"reward.terms.{name} ({config.path})"
        self._timeout_seconds = config.timeout_seconds
        self._function = function
        self._threads = None if is_async(function) else asyncio.Semaphore(MAX_THREADS)

    async def __call__(self, trajectory: Trajectory, text: str, prompt: Prompt) -> float:
        on = f"on {prompt.prompt_id}, completion {_short(text)}"
        call = partial(self._function, trajectory, text, prompt.row)
        try:
            value, error = await self._outcome(call)
        except TimeoutError:
            raise RewardError(
                f"{self._label} took longer than timeout_seconds = {self._timeout_seconds:g} {on}"
            ) from None
        if error is not None:
            raise RewardError(f"{self._label} raised {_last_words(error)} {on}") from error
        if not isinstance(value, numbers.Real | np.bool_):
            raise RewardError(f"{self._label} returned {type(value).__name__} {_short(value)}, not a number, {on}")
        if not math.isfinite(value):
            raise RewardError(f"{self._label} returned {value}, not a finite number, {on}")
        return float(value)

    async def _outcome(self, call: Callable[[], Any]) -> Outcome:
        if self._threads is None:
            return await asyncio.wait_for(_awaited(call()), self._timeout_seconds)
        async with self._threads:  # waiting for a turn is no fault of the function
            return await asyncio.wait_for(_in_thread(call), self._timeout_seconds)


async def _awaited(coroutine: Awaitable[Any]) -> Outcome:
    try:
        return await coroutine, None
    except (Exception, SystemExit) as e:  # noqa: BLE001 -- the user's code may raise anything
        return None, e


async def _in_thread(call: Callable[[], Any]) -> Outcome:
    """What `call` does in a thread of its own: an executor would keep the process from ending while one hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()

    def finish(outcome: Outcome) -> None:
        if not done.done():  # timed out meanwhile
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome: Outcome = (call(), None)
        except (Exception, SystemExit) as e:  # noqa: BLE001 -- the user's code may raise anything
            outcome = (None, e)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await done


def _last_words(error: BaseException) -> str:
    """Type, message and place, in words: tracebacks do not survive the way to another process."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} (at {frames[-1].filename}:{frames[-1].lineno})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE // 2]} ... {text[-LONGEST_QUOTE // 2 :]}"
