"""Sends requests to a reward service: with a timeout, retries, a circuit breaker, and a bound on their number.

The circuit breaker holds requests back while the service is down:

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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from megarl.config.reward import ServiceRewardConfig
from megarl.errors import ConfigError
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
