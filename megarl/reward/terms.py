"""The built-in reward terms, and the interface of all terms: from the completions of a prompt to their values."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast, override

import regex

from megarl.batch.trajectory import MAX_REWARD, Prompt, Trajectory
from megarl.config.reward import TERM_METRICS, FormatRewardConfig, MathRewardConfig, NumericRewardConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.answer_structure import (
    chosen_letter,
    is_text,
    read_base,
    read_choice,
    read_structure,
    split_unit,
    words_of,
)
from megarl.reward.answer_text import clean_answer, is_too_deep
from megarl.reward.math_equivalence import (
    ANSWER_MARK,
    CPU_SECONDS,
    MAX_CHECKERS,
    TIMEOUT_SECONDS,
    Comparison,
    EquivalenceError,
    compare,
    extract_final_answer,
)
from megarl.reward.quantities import are_compatible, read_quantities
from megarl.text import replace_surrogates, text_of
from megarl.user_code import CallOutcome, outcome_of, read_number


class CallThreads:
    """Runs calls in daemon threads. A call that times out continues in its thread, because a thread cannot be killed.

    Not an executor: a hung call in an executor would keep the process from exiting.
    """

    def __init__(self, label: str, max_threads: int) -> None:
        """Create the runner; starts no thread.

        Args:
            label: name of the reward term, for error messages.
            max_threads: maximum number of concurrent calls, and of calls that continue after their timeout.
        """
        self._label = label
        self._max_threads = max_threads
        self._slots = asyncio.Semaphore(max_threads)
        self._num_hung = 0
        self._lock = threading.Lock()

    async def run(self, call: Callable[[], object], timeout_seconds: float | None) -> CallOutcome:
        """Return the outcome of `call()`; the time spent waiting for a thread does not count towards the timeout.

        Raises:
            TimeoutError: the call takes longer than `timeout_seconds`.
            RewardError: too many calls have not returned since their timeout.
        """
        async with self._slots:
            with self._lock:
                num_hung = self._num_hung
            if num_hung >= self._max_threads:
                raise RewardError(
                    f"{self._label}: {num_hung} calls are still running after their timeout; make the reward return, "
                    "for example with timeouts of its own, or write it as an async function, which can be cancelled"
                )
            return await asyncio.wait_for(self._run_in_thread(call), timeout_seconds)

    async def call[T](self, call: Callable[[], T], timeout_seconds: float | None) -> T:
        """Return what `call()` returns; raises what it raises, and as `run`."""
        value, error = await self.run(call, timeout_seconds)
        if error is not None:
            raise error
        return cast("T", value)

    async def _run_in_thread(self, call: Callable[[], object]) -> CallOutcome:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[CallOutcome] = loop.create_future()
        is_returned = is_hung = False

        def work() -> None:
            nonlocal is_returned
            outcome = outcome_of(call)
            with self._lock:
                is_returned = True
                self._num_hung -= is_hung
            with suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(outcome))

        threading.Thread(target=work, name="reward", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            with self._lock:
                is_hung = not is_returned
                self._num_hung += is_hung
            raise


MAX_ANSWER_LENGTH = 500
"""Maximum number of characters of an answer that is read; a longer one equals only the same text."""


def numeric_reward(text: str, answer: str, *, strict: bool, finished: bool) -> float:
    r"""Return 1.0 if the final answer in `text` equals the reference number, else 0.0, in microseconds.

    The final answer is the last `#### N` or `\boxed{N}`. The reference is the final answer in `answer`, or all of
    `answer` if it has none; one that is no number equals only the same text. Numbers are compared exactly (72 = 72.0 =
    \$72, 0.5 = 1/2), and their units where both have one. Arithmetic must be carried out: `#### 8+3` is not 11.

    Examples:
        >>> numeric_reward("6 * 12 = 72\n#### 72.0", "#### 72", strict=False, finished=True)
        1.0
        >>> numeric_reward("6 * 12 = 72\n#### 72.0", "#### 72", strict=True, finished=True)
        0.0

    Args:
        text: the completion.
        answer: the answer in the data, for example GSM8K's "...\n#### 72".
        strict: also require `finished`, and that `text` ends in exactly `#### <reference>`.
        finished: whether the policy ended the completion with a stop token.
    """
    reference = extract_reference(answer)
    if strict:
        return float(finished and text.endswith(f"{ANSWER_MARK} {reference}"))
    return float(compare_final_answer(text, answer) == "equal")


def math_reward(
    text: str, answer: str, *, cpu_seconds: float = CPU_SECONDS, timeout_seconds: float = TIMEOUT_SECONDS
) -> Comparison:
    """Compare the final answer in `text` with the reference in `answer`, both as in `numeric_reward`.

    Numbers and texts take microseconds; expressions, sets, intervals, tuples, matrices, equations and inequalities are
    compared with sympy, in milliseconds.

    Examples:
        >>> math_reward("so it is #### 0.5", "1/2"), math_reward("so it is #### 0.6", "1/2")
        ('equal', 'unequal')

    Args:
        text: the completion.
        answer: the answer in the data.
        cpu_seconds: CPU time after which a comparison is undecided.
        timeout_seconds: wall time after which the process of sympy is taken for hung.

    Raises:
        EquivalenceError: the reference cannot be compared with itself, or the process of sympy is lost.
        RewardError: the process of sympy does not start.
    """
    compared = compare_final_answer(text, answer)
    return compared if isinstance(compared, str) else compare(*compared, cpu_seconds, timeout_seconds)


def compare_final_answer(text: str, answer: str) -> Comparison | tuple[str, str]:
    """Return the value of `math_reward` if it takes only microseconds, else what `compare_texts` returns."""
    prediction = extract_final_answer(text)
    return "unequal" if prediction is None else compare_texts(prediction, extract_reference(answer))


def compare_texts(prediction: str, reference: str) -> Comparison | tuple[str, str]:
    """Compare what needs no algebra: equal texts, numbers, words and choices.

    Returns:
        The result; or the structures of the two answers as JSON, whose comparison needs algebra.
    """
    if prediction == reference:
        return "equal"
    if max(len(prediction), len(reference)) > MAX_ANSWER_LENGTH:
        return "unequal"
    got, wanted = clean_answer(prediction), clean_answer(reference)
    if _without_spaces(got) == _without_spaces(wanted):
        return "equal"
    quantities = read_quantities(wanted, is_reference=True)
    if quantities:
        found = read_quantities(got)
        return "equal" if any(one.equals(other) for one in found for other in quantities) else "unequal"
    letter = read_choice(wanted)
    if letter is not None:
        return "equal" if chosen_letter(got) == letter else "unequal"
    if is_text(wanted):
        return "equal" if words_of(got) == words_of(wanted) else "unequal"
    if read_base(got) or read_base(wanted):
        return "equal" if read_base(got) == read_base(wanted) else "unequal"
    if not are_compatible(split_unit(got)[1], split_unit(wanted)[1]):
        return "unequal"
    if is_too_deep(got):
        return "undecided"
    return json.dumps(read_structure(got)), json.dumps(read_structure(wanted))


def _without_spaces(text: str) -> str:
    """Return a text without the spaces beside signs; those between letters and digits have a meaning."""
    return re.sub(r"\s*([^\w\s])\s*", r"\1", text)


def is_number(answer: str) -> bool:
    """Whether the reference in an answer of the data is a number, as the reward `numeric` needs it."""
    reference = extract_reference(answer)
    return len(reference) <= MAX_ANSWER_LENGTH and bool(read_quantities(clean_answer(reference), is_reference=True))


def reference_structure(answer: str) -> str | None:
    """Return the structure of a reference as JSON if its comparison needs algebra, else None."""
    reference = extract_reference(answer)
    if len(reference) > MAX_ANSWER_LENGTH:
        return None
    compared = compare_texts("\\emptyset", reference)
    return None if isinstance(compared, str) else compared[1]


def extract_reference(answer: str) -> str:
    """Return the final answer in an answer of the data, or all of it if it has none."""
    return extract_final_answer(answer) or answer.strip()


MAX_QUOTE_LENGTH = 300
"""Maximum number of characters of a completion that an error message quotes."""

FAST_SEARCH_SECONDS = 0.01
"""CPU time of a regular expression on the event loop; a search that needs longer is repeated in a thread."""

MAX_SEARCH_THREADS = 8
"""Maximum number of concurrent searches that need longer than FAST_SEARCH_SECONDS, per term."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A trajectory and the text that the policy sampled in it, without special tokens.

    Examples:
            values = await term.score([rewards.Completion(trajectory, text) for trajectory, text in sampled], prompt)
    """

    trajectory: Trajectory
    text: str


@dataclass(frozen=True, slots=True)
class TermValue:
    """The value of a term on one completion.

    Examples:
        >>> TermValue(0.5, {"length": 12.0}).reward
        0.5
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further values by name, which are only logged."""


class TermError(Exception):
    """A term failed on one completion; if it fails again, the term's `on_error` decides what follows.

    Examples:
            return [rewards.TermError(f"no score: {response.status}"), rewards.TermValue(0.5)]  # of two completions
    """


class Term(Protocol):
    """A reward term of the configuration.

    Examples:
            class Brevity:
                compares_completions = False

                async def score(self, completions, prompt):
                    return [rewards.TermValue(1 / (1 + len(each.text))) for each in completions]

                async def close(self) -> None:
                    pass
    """

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


class CompletionTerm(ABC):
    """Base class of terms that score each completion by itself, all those of a prompt at once."""

    compares_completions = False

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return the value or the failure of each completion; as `Term`."""
        return await asyncio.gather(*(self._score(completion, prompt) for completion in completions))

    @abstractmethod
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        """Return the value or the failure of one completion."""

    async def close(self) -> None:  # noqa: B027
        """Do nothing: the term holds no resources of its own."""


class NumericTerm(CompletionTerm):
    """Compares final answers with the reference; see `numeric_reward`. The value is 1.0 or 0.0."""

    def __init__(self, name: str, config: NumericRewardConfig) -> None:
        self._label = f"reward.terms.{name} (numeric)"
        self._strict = config.strict

    @override
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue:
        finished = completion.trajectory.finish_reason == "stop"
        values = (
            numeric_reward(completion.text, answer, strict=self._strict, finished=finished)
            for answer in require_answers(prompt, self._label)
        )
        return TermValue(max(values))


class MathTerm(CompletionTerm):
    """Compares final answers with the reference, in processes of sympy that all terms share; see `math_reward`.

    The value is 1.0 if a completion is correct, else 0.0, with the metric `undecided`.
    """

    def __init__(self, name: str, config: MathRewardConfig) -> None:
        self._label = f"reward.terms.{name} (math)"
        self._config = config
        self._threads = CallThreads(self._label, MAX_CHECKERS)

    @override
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        answers = require_answers(prompt, self._label)
        compared = [compare_final_answer(completion.text, answer) for answer in answers]
        results = {each for each in compared if isinstance(each, str)}
        for each in compared:
            if "equal" in results:
                break
            if not isinstance(each, str):
                run = partial(compare, *each, self._config.cpu_seconds, self._config.timeout_seconds)
                try:
                    results.add(await self._threads.call(run, None))  # the comparison has limits of its own
                except EquivalenceError as e:
                    return TermError(f"{self._label}: {e} {quote(completion, prompt)}")
        is_equal = "equal" in results
        return TermValue(float(is_equal), {"undecided": float(not is_equal and "undecided" in results)})


class FormatTerm(CompletionTerm):
    """Searches for a regular expression, with a timeout and without blocking the event loop.

    The value is 1.0 if the pattern is found, else 0.0. The package `regex` can interrupt a search, which `re` cannot.
    """

    def __init__(self, name: str, config: FormatRewardConfig) -> None:
        """Create the term.

        Raises:
            ConfigError: the pattern is not a regular expression.
        """
        self._label = f"reward.terms.{name} (format)"
        self._pattern = compile_pattern(config.pattern, key=f"reward.terms.{name}.pattern")
        self._timeout_seconds = config.timeout_seconds
        self._threads = CallThreads(self._label, MAX_SEARCH_THREADS)

    @override
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        seconds = self._timeout_seconds
        try:
            return TermValue(self.search(completion.text, timeout=min(seconds, FAST_SEARCH_SECONDS)))
        except TimeoutError:
            pass
        search = partial(self.search, completion.text, timeout=seconds, concurrent=True)
        try:
            return TermValue(await self._threads.call(search, seconds))
        except TimeoutError:
            return TermError(
                f"{self._label} took longer than timeout_seconds = {seconds:g} {quote(completion, prompt)}"
            )

    def search(self, text: str, *, timeout: float, concurrent: bool = False) -> float:
        """Return 1.0 if the pattern is found, else 0.0. `timeout` is in seconds of CPU time.

        Args:
            concurrent: release the GIL.

        Raises:
            TimeoutError: the search takes longer.
        """
        return float(self._pattern.search(text, timeout=timeout, concurrent=concurrent) is not None)


class EnvironmentTerm(CompletionTerm):
    """Adds up the rewards that the environment has given for the turns of an episode."""

    @override
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue:
        return TermValue(float(sum(completion.trajectory.turn_rewards)))


def require_answers(prompt: Prompt, label: str) -> tuple[str, ...]:
    """Return the reference answers of a prompt, at least one.

    Raises:
        RewardError: it has none.
    """
    if prompt.answer is None:
        raise RewardError(f"{label} needs a reference answer (data.fields.answer), but {prompt.prompt_id} has none")
    return prompt.answers


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


REWARD_KEY = "reward"
"""Key of the reward in a mapping; all other keys are only logged."""


def read_result(label: str, result: object, where: str) -> TermValue | TermError:
    """Return the value of one completion: a finite number, or a mapping of such numbers with the key `reward`.

    Args:
        label: name of the term, for error messages.
        where: the completion, for error messages.
    """
    if not isinstance(result, Mapping):
        return _read_numbers(label, {REWARD_KEY: result}, where)
    keys = abbreviate(list(result))
    if REWARD_KEY not in result:
        return TermError(f"{label} returned a mapping without the key {REWARD_KEY!r}, but {keys}, {where}")
    if not all(isinstance(name, str) and name not in TERM_METRICS for name in result):
        what = f"needs to return a mapping whose keys are strings other than {', '.join(TERM_METRICS)}"
        return TermError(f"{label} {what}, got {keys}, {where}")
    return _read_numbers(label, result, where)


def _read_numbers(label: str, result: Mapping[str, object], where: str) -> TermValue | TermError:
    found: dict[str, float] = {}
    for name, value in result.items():
        at = "" if name == REWARD_KEY else f" for {abbreviate(name)}"
        number = read_number(value)
        if number is None:
            got = f"{type(value).__name__} {abbreviate(value)}{at}"
            return TermError(f"{label} returned {got}, not a number, {where}")
        if not math.isfinite(number):
            return TermError(f"{label} returned {abbreviate(value)}{at}, not a finite number, {where}")
        if name == REWARD_KEY and abs(number) > MAX_REWARD:
            return TermError(f"{label} returned {abbreviate(value)}, a reward beyond {MAX_REWARD:g}, {where}")
        found[replace_surrogates(name)] = number
    return TermValue(found.pop(REWARD_KEY), found)
