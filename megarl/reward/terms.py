"""The built-in reward terms, and the interface of all terms: from the completions of a prompt to their values."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import regex

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.reward import FormatRewardConfig, MathRewardConfig, NumericRewardConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.call_threads import CallThreads
from megarl.reward.math_equivalence import MAX_CHECKERS, EquivalenceError, compare
from megarl.reward.rules import compare_final_answer, numeric_reward
from megarl.text import text_of

MAX_QUOTE_LENGTH = 300
"""Maximum number of characters of a completion that an error message quotes."""

FAST_SEARCH_SECONDS = 0.01
"""CPU time of a regular expression on the event loop; a search that needs longer is repeated in a thread."""

MAX_SEARCH_THREADS = 8
"""Maximum number of concurrent searches that need longer than FAST_SEARCH_SECONDS, per term."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A trajectory and the text that the policy sampled in it, without special tokens."""

    trajectory: Trajectory
    text: str


@dataclass(frozen=True, slots=True)
class TermValue:
    """The value of a term on one completion."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further values by name, which are only logged."""


class TermError(Exception):
    """A term failed on one completion; if it fails again, the term's `on_error` decides what follows."""


class Term(Protocol):
    """A reward term of the configuration."""

    @property
    def compares_completions(self) -> bool:
        """Whether the value of a completion depends on the other completions of the prompt."""
        ...

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return the value or the failure of each of the completions, which are all those of one prompt.

        Raises:
            RewardError: the term cannot work at all.
        """
        ...

    async def close(self) -> None:
        """Release what the term holds."""
        ...


class NumericTerm:
    """Compares final answers with the reference; see `numeric_reward`."""

    compares_completions = False

    def __init__(self, name: str, config: NumericRewardConfig) -> None:
        self._label = f"reward.terms.{name} (numeric)"
        self._strict = config.strict

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return 1.0 for each correct completion and 0.0 for the others; as `Term`."""
        answer = require_answer(prompt, self._label)
        return [
            TermValue(
                numeric_reward(
                    completion.text,
                    answer,
                    strict=self._strict,
                    finished=completion.trajectory.finish_reason == "stop",
                )
            )
            for completion in completions
        ]

    async def close(self) -> None:
        """Do nothing: the term holds no resources."""


class MathTerm:
    """Compares final answers with the reference; see `math_reward`."""

    compares_completions = False

    def __init__(self, name: str, config: MathRewardConfig) -> None:
        self._label = f"reward.terms.{name} (math)"
        self._config = config
        self._threads = CallThreads(self._label, MAX_CHECKERS)

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return 1.0 for each correct completion and 0.0 for the others, with the metric `undecided`; as `Term`."""
        answer = require_answer(prompt, self._label)
        return await asyncio.gather(*(self._score(completion, prompt, answer) for completion in completions))

    async def _score(self, completion: Completion, prompt: Prompt, answer: str) -> TermValue | TermError:
        compared = compare_final_answer(completion.text, answer)
        if not isinstance(compared, str):
            run = partial(compare, *compared, self._config.cpu_seconds, self._config.timeout_seconds)
            try:
                compared = await self._threads.call(run, None)  # the comparison has limits of its own
            except EquivalenceError as e:
                return TermError(f"{self._label}: {e} {quote(completion, prompt)}")
        return TermValue(float(compared == "equal"), {"undecided": float(compared == "undecided")})

    async def close(self) -> None:
        """Do nothing: the processes of sympy are shared by all terms and end with this process."""


class FormatTerm:
    """Searches for a regular expression, with a timeout and without blocking the event loop.

    The package `regex` can interrupt a search, which `re` cannot.
    """

    compares_completions = False

    def __init__(self, name: str, config: FormatRewardConfig) -> None:
        """Create the term.

        Raises:
            ConfigError: the pattern is not a regular expression.
        """
        self._label = f"reward.terms.{name} (format)"
        self._pattern = compile_pattern(config.pattern, key=f"reward.terms.{name}.pattern")
        self._timeout_seconds = config.timeout_seconds
        self._threads = CallThreads(self._label, MAX_SEARCH_THREADS)

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return 1.0 for each completion that matches and 0.0 for the others; as `Term`."""
        return await asyncio.gather(*(self._score(completion, prompt) for completion in completions))

    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        seconds = self._timeout_seconds
        try:
            return TermValue(self._search(completion.text, timeout=min(seconds, FAST_SEARCH_SECONDS)))
        except TimeoutError:
            pass
        search = partial(self._search, completion.text, timeout=seconds, concurrent=True)
        try:
            return TermValue(await self._threads.call(search, seconds))
        except TimeoutError:
            return TermError(
                f"{self._label} took longer than timeout_seconds = {seconds:g} {quote(completion, prompt)}"
            )

    def _search(self, text: str, *, timeout: float, concurrent: bool = False) -> float:
        """Return 1.0 if the pattern is found, else 0.0. `timeout` is in seconds of CPU time.

        Args:
            concurrent: release the GIL.

        Raises:
            TimeoutError: the search takes longer.
        """
        return float(self._pattern.search(text, timeout=timeout, concurrent=concurrent) is not None)

    async def close(self) -> None:
        """Do nothing: the term holds no resources."""


class EnvironmentTerm:
    """Adds up the rewards that the environment has given for the turns of an episode."""

    compares_completions = False

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return the sum of each completion; as `Term`."""
        return [TermValue(float(sum(completion.trajectory.turn_rewards))) for completion in completions]

    async def close(self) -> None:
        """Do nothing: the term holds no resources."""


def require_answer(prompt: Prompt, label: str) -> str:
    """Return the reference answer of a prompt.

    Raises:
        RewardError: it has none.
    """
    if prompt.answer is None:
        raise RewardError(f"{label} needs a reference answer (data.fields.answer), but {prompt.prompt_id} has none")
    return prompt.answer


def compile_pattern(pattern: str, *, key: str) -> regex.Pattern[str]:
    """Return the compiled regular expression.

    Raises:
        ConfigError: it is not valid; names the YAML path `key`.
    """
    try:
        return regex.compile(pattern)
    except regex.error as e:
        raise ConfigError(f"{key}: needs a regular expression, got {pattern!r}: {e}") from e


def quote(completion: Completion, prompt: Prompt) -> str:
    """Return "on <prompt id>, completion <text>" for error messages, with a long text shortened."""
    return f"on {prompt.prompt_id}, completion {abbreviate(completion.text)}"


def abbreviate(value: object) -> str:
    """Return the `repr` of a value, without its middle if it is long; the name of its type if it has none."""
    text = text_of(value)
    return (
        text
        if len(text) <= MAX_QUOTE_LENGTH
        else f"{text[: MAX_QUOTE_LENGTH // 2]} ... {text[-MAX_QUOTE_LENGTH // 2 :]}"
    )
