"""The reward term that calls a function or class of the user."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from megarl.batch.trajectory import Prompt
from megarl.config.reward import PythonRewardConfig
from megarl.reward.call_threads import CallThreads
from megarl.reward.python_function import load_reward
from megarl.reward.term_result import read_result
from megarl.reward.terms import Completion, TermError, TermValue, abbreviate, quote
from megarl.text import describe_error
from megarl.user_code import await_outcome

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
