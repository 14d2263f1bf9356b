"""Rewards that services compute: the terms `http` and `judge`, and the client that they share.

The client sends requests with a timeout, retries, a circuit breaker and a bound on their number. The circuit breaker
holds requests back while the service is down:

closed  -- several failures in a row -->  open  -- cooldown -->  half open: one request tries the service
^                                        ^                          |
|                                        '------ it fails ----------|
'------------------------ it succeeds ------------------------------'
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, override

import httpx

from megarl.batch.trajectory import Prompt
from megarl.cluster.workers.dispatch import call_for_all
from megarl.config.reward import HttpRewardConfig, JudgeRewardConfig, ServiceRewardConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.terms import (
    Completion,
    CompletionTerm,
    TermError,
    TermValue,
    abbreviate,
    compile_pattern,
    quote,
    read_result,
)
from megarl.text import replace_surrogates

MAX_FAILURES = 5
"""Number of failed requests in a row after which further ones are held back."""

COOLDOWN_SECONDS = 10.0
"""Seconds until one request tries the service again; the others wait for its result."""


class CircuitOpenError(Exception):
    """The request was not sent, because the service was down before, and still is."""


class CircuitBreaker:
    """The circuit breaker of one service, for the requests of one event loop."""

    def __init__(
        self,
        max_concurrent_requests: int,
        *,
        max_failures: int = MAX_FAILURES,
        cooldown_seconds: float = COOLDOWN_SECONDS,
    ) -> None:
        self._max_failures, self._cooldown_seconds = max_failures, cooldown_seconds
        self._slots = asyncio.Semaphore(max_concurrent_requests)
        self._num_failures = 0
        """Number of consecutive failures."""
        self._opened_at: float | None = None
        """Time of the event loop at which requests were held back, None while they are not."""
        self._trial: asyncio.Future[bool | None] | None = None
        """Whether the request that tries the service succeeds, None if it is canceled; None if there is no request."""

    @property
    def is_open(self) -> bool:
        """Whether requests are held back."""
        return self._opened_at is not None

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait until the body may send a request; an exception of the body other than a cancellation is a failure.

        A request that is held back takes no slot, so that all of them wait for the same trial.

        Raises:
            CircuitOpenError: the request that has tried the service after the cooldown failed.
        """
        is_trial = has_slot = False
        try:
            while not has_slot:
                is_trial = await self._wait()
                await self._slots.acquire()
                has_slot = is_trial or not self.is_open
                if not has_slot:
                    self._slots.release()
            yield
        except CircuitOpenError:
            raise
        except asyncio.CancelledError:
            self._end_trial(is_trial, succeeded=None)
            raise
        except BaseException:
            self._num_failures += 1
            if is_trial or (not self.is_open and self._num_failures >= self._max_failures):
                self._opened_at = asyncio.get_running_loop().time()
            self._end_trial(is_trial, succeeded=False)
            raise
        else:
            self._num_failures, self._opened_at = 0, None
            self._end_trial(is_trial, succeeded=True)
        finally:
            if has_slot:
                self._slots.release()

    async def _wait(self) -> bool:
        """Wait while requests are held back; return whether this one tries the service."""
        loop = asyncio.get_running_loop()
        while self._opened_at is not None:
            opened_at, trial = self._opened_at, self._trial
            remaining = opened_at + self._cooldown_seconds - loop.time()
            if remaining > 0:
                await asyncio.sleep(remaining)
                if self._opened_at not in (None, opened_at):
                    raise CircuitOpenError
            elif trial is None:
                self._trial = loop.create_future()
                return True
            elif await asyncio.shield(trial) is False:
                raise CircuitOpenError
        return False

    def _end_trial(self, is_trial: bool, *, succeeded: bool | None) -> None:
        if is_trial and self._trial is not None:
            trial, self._trial = self._trial, None
            trial.set_result(succeeded)


RETRIED_STATUSES = frozenset({408, 429, *range(500, 600)})
"""Statuses of a service that is overloaded or down; another request may succeed."""

BACKOFF_SECONDS = 0.5
"""Mean time in seconds before the first retry of a request; it doubles with each retry."""

MAX_BACKOFF_SECONDS = 30.0
"""Longest mean time in seconds before a retry."""

MAX_QUOTED_BODY = 200
"""Number of characters of a refused request's answer that an error message quotes."""


class ServiceError(Exception):
    """A service did not answer a request, or not as it should."""


class RefusedRequestError(ServiceError):
    """A service refused a request, and would refuse it again."""


class _RetriedError(Exception):
    """An attempt failed, and another one may succeed."""

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds
        """Time that the service asks to wait."""


class ServiceClient:
    """Posts JSON to one service, from one event loop."""

    def __init__(self, config: ServiceRewardConfig, *, key: str) -> None:
        """Create the client; sends nothing.

        Args:
            config: the reward term.
            key: YAML path of the term, for error messages.

        Raises:
            ConfigError: the environment variable of the API key is not set.
        """
        headers = {"Content-Type": "application/json"}
        if config.api_key_env is not None:
            secret = os.environ.get(config.api_key_env)
            if not secret:
                raise ConfigError(
                    f"{key}.api_key_env: rollout workers need the environment variable {config.api_key_env}, which is "
                    "not set; set it on every node before the cluster starts"
                )
            headers["Authorization"] = f"Bearer {secret}"
        self._config = config
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # noqa: S113 -- `_attempt` limits the whole request, httpx only its parts
            limits=httpx.Limits(max_connections=config.max_concurrent_requests),
        )
        self._breaker = CircuitBreaker(config.max_concurrent_requests)
        self._random = random.Random()  # unseeded: workers must not retry at the same times

    async def post(self, url: str, body: Mapping[str, Any]) -> object:
        """Return the service's answer to `body`, parsed from JSON.

        Values that JSON lacks are sent as text, NaN and infinities as null, surrogates as U+FFFD.

        Raises:
            RefusedRequestError: a status that a retry would not change.
            ServiceError: no attempt was answered, or the answer is not JSON.
        """
        content = _encode(body)
        for attempt in range(self._config.max_retries + 1):
            try:
                async with self._breaker.request():
                    response = await self._attempt(url, content)
                break
            except CircuitOpenError:
                reason, wait_seconds = "the service is down: requests are held back", 0.0
            except _RetriedError as error:
                reason, wait_seconds = str(error), error.wait_seconds
            if attempt == self._config.max_retries:
                raise ServiceError(f"{reason} (attempt {attempt + 1} of {attempt + 1})")
            mean = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2**attempt)
            await asyncio.sleep(max(self._random.uniform(0, 2 * mean), min(wait_seconds, MAX_BACKOFF_SECONDS)))
        if not response.is_success:
            text = response.text[:MAX_QUOTED_BODY]
            raise RefusedRequestError(f"the service refused the request with status {response.status_code}: {text!r}")
        try:
            answer: object = response.json()
        except (ValueError, RecursionError) as error:  # also integers of thousands of digits and deep nesting
            text = response.text[:MAX_QUOTED_BODY]
            raise ServiceError(f"the service's answer needs to be JSON, got {text!r}") from error
        return answer

    async def _attempt(self, url: str, content: bytes) -> httpx.Response:
        seconds = self._config.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                response = await self._http.post(url, content=content)
        except TimeoutError as error:
            raise _RetriedError(f"the service took longer than timeout_seconds = {seconds:g}") from error
        except httpx.RequestError as error:
            raise _RetriedError(f"the service cannot be reached: {type(error).__name__}: {error}") from error
        if response.status_code in RETRIED_STATUSES:
            wait = response.headers.get("Retry-After", "")
            raise _RetriedError(
                f"the service answered with status {response.status_code}", float(wait) if wait.isdecimal() else 0.0
            )
        return response

    async def close(self) -> None:
        """Close the connections to the service."""
        await self._http.aclose()


def _encode(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, default=str, ensure_ascii=False)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    return replace_surrogates(text).encode()


BATCH_WAIT_SECONDS = 0.02
"""Seconds that a completion waits for others to be sent in the same request."""


class RequestBatcher[T, R]:
    """Sends items in batches: a full one at once, others after a short wait.

    A caller that is canceled does not cancel the request, which has items of others.
    """

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, max_size: int, wait_seconds: float
    ) -> None:
        """Args:
        send: returns one result per item, in order; its error is raised in each caller of the batch.
        max_size: largest number of items of a batch.
        wait_seconds: longest time that an item waits for others.
        """
        self._send, self._max_size, self._wait_seconds = send, max_size, wait_seconds
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def submit(self, item: T) -> R:
        """Return the result of the item."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, result))
        if len(self._waiting) >= self._max_size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_seconds, self._flush)
        return await result

    async def close(self) -> None:
        """Cancel the requests in flight."""
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(item, result) for item, result in self._waiting if not result.done()]  # others were canceled
        self._waiting = []
        if batch:
            request = asyncio.create_task(call_for_all(self._send, batch))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)


class HttpTerm(CompletionTerm):
    """Sends completions in batches to a service, and checks what it answers."""

    def __init__(self, name: str, config: HttpRewardConfig) -> None:
        """Create the term; raises as `ServiceClient`."""
        self._label = f"reward.terms.{name} (http, {config.url})"
        self._config = config
        self._client = ServiceClient(config, key=f"reward.terms.{name}")
        self._batcher: RequestBatcher[Mapping[str, Any], object] = RequestBatcher(
            self._send, max_size=config.max_batch_size, wait_seconds=BATCH_WAIT_SECONDS
        )

    @override
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        item = {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text,
            "completion": completion.text,
            "finish_reason": completion.trajectory.finish_reason,
            "row": dict(prompt.row),
            "answer": prompt.answer,
            "other_answers": list(prompt.other_answers),
        }
        where = quote(completion, prompt)
        result = await self._batcher.submit(item)
        if isinstance(result, ServiceError):
            failure = TermError(f"{self._label}: {result} {where}")
            failure.__cause__ = result
            return failure
        return read_result(self._label, result, where)

    async def _send(self, items: Sequence[Mapping[str, Any]]) -> Sequence[object | ServiceError]:
        """Return the service's result for each item, or the error. A batch that it refuses is split in two."""
        try:
            return self._read_answer(await self._client.post(self._config.url, {"completions": items}), len(items))
        except ServiceError as error:
            if not isinstance(error, RefusedRequestError) or len(items) == 1:
                return [error] * len(items)
        half = len(items) // 2
        first, second = await asyncio.gather(self._send(items[:half]), self._send(items[half:]))
        return [*first, *second]

    def _read_answer(self, answer: object, num: int) -> Sequence[object]:
        if not isinstance(answer, list):
            got = f"{type(answer).__name__} {abbreviate(answer)}"
            raise ServiceError(f"the service needs to answer with a list of {num} results, got {got}")
        if len(answer) != num:
            raise ServiceError(f"the service needs to answer with {num} results, one per completion, got {len(answer)}")
        return answer

    @override
    async def close(self) -> None:
        """Cancel requests in flight and close the connections."""
        await self._batcher.close()
        await self._client.close()


SEARCH_SECONDS = 1.0
"""CPU time of the search for the score in a reply."""

_FIELDS = re.compile(r"\{(prompt|completion|answer)\}")


class JudgeTerm(CompletionTerm):
    """Asks a judge for the score of each completion, in a request of its own.

    The value is scaled to 0 to 1; the score itself is the further value `score`.
    """

    def __init__(self, name: str, config: JudgeRewardConfig) -> None:
        """Create the term.

        Raises:
            ConfigError: the pattern is no regular expression with a group, or as `ServiceClient` raises it.
        """
        self._label = f"reward.terms.{name} (judge, {config.url})"
        self._config = config
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        check_judge_pattern(config, key=f"reward.terms.{name}")
        self._pattern = compile_pattern(config.pattern, key=f"reward.terms.{name}.pattern")
        self._client = ServiceClient(config, key=f"reward.terms.{name}")

    @override
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        if prompt.answer is None and "{answer}" in self._config.rubric:
            raise RewardError(
                f"{self._label} needs a reference answer for its rubric (data.fields.answer), but {prompt.prompt_id} "
                "has none"
            )
        config = self._config
        try:
            score = self._read_score(_read_reply(await self._client.post(self._url, self._body(completion, prompt))))
        except ServiceError as error:
            failure = TermError(f"{self._label}: {error} {quote(completion, prompt)}")
            failure.__cause__ = error
            return failure
        reward = (score - config.min_score) / (config.max_score - config.min_score)
        return TermValue(reward, {"score": score})

    def _body(self, completion: Completion, prompt: Prompt) -> dict[str, object]:
        config = self._config
        values = {"prompt": prompt.text, "completion": completion.text, "answer": " or ".join(prompt.answers)}
        # in one pass, so that a completion which contains {answer} does not get it
        rubric = _FIELDS.sub(lambda match: values[match[1]], config.rubric)
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        return {
            "model": config.model,
            "messages": [*system, {"role": "user", "content": rubric}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }

    def _read_score(self, reply: str) -> float:
        """Return the number in the first group of the last match.

        Raises:
            ServiceError: there is none, or it is outside the scale.
        """
        config, score = self._config, None
        try:
            for match in self._pattern.finditer(reply, timeout=SEARCH_SECONDS):
                score = match[1]
        except TimeoutError as error:
            raise ServiceError(f"the search for the score took longer than {SEARCH_SECONDS:g} s") from error
        if score is None:
            raise ServiceError(f"the judge's reply has no match of the pattern {config.pattern!r}: {abbreviate(reply)}")
        try:
            value = float(score)
        except ValueError as error:
            raise ServiceError(f"the judge's score needs to be a number, got {abbreviate(score)}") from error
        if not config.min_score <= value <= config.max_score:
            raise ServiceError(
                f"the judge's score needs to be between {config.min_score:g} and {config.max_score:g}, got {value:g}"
            )
        return value

    @override
    async def close(self) -> None:
        """Close the connections to the judge."""
        await self._client.close()


def check_judge_pattern(config: JudgeRewardConfig, *, key: str) -> None:
    """Check the pattern of a judge.

    Args:
        key: YAML path of the term, for error messages.

    Raises:
        ConfigError: it is no regular expression, or has no group.
    """
    if not compile_pattern(config.pattern, key=f"{key}.pattern").groups:
        raise ConfigError(
            f"{key}.pattern: needs a group around the score, as in 'score: (\\d+)', got {config.pattern!r}"
        )


def _read_reply(answer: object) -> str:
    """Return the text of the first choice.

    Raises:
        ServiceError: the answer has none.
    """
    try:
        text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
    except (LookupError, TypeError) as error:
        raise ServiceError(f"the answer needs choices[0].message.content, got {abbreviate(answer)}") from error
    if not isinstance(text, str):
        raise ServiceError(f"the judge's reply needs to be text, got {abbreviate(text)}")
    return text
