"""Sends requests to a reward service: with a timeout, retries, a circuit breaker, and a bound on their number."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from typing import Any

import httpx

from megarl.config.reward_services import ServiceRewardConfig
from megarl.errors import ConfigError
from megarl.reward.services.circuit_breaker import CircuitBreaker, CircuitOpenError
from megarl.text import replace_surrogates

RETRIED_STATUSES = frozenset({408, 429, *range(500, 600)})
"""Statuses of a service that is overloaded or down; another request may succeed."""

MAX_BACKOFF_SECONDS = 30.0
"""Longest mean time before a retry."""

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
        self._breaker = CircuitBreaker(config.breaker, config.max_concurrent_requests)
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
            mean = min(MAX_BACKOFF_SECONDS, self._config.backoff_seconds * 2**attempt)
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
        """Close the connections."""
        await self._http.aclose()


def _encode(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, default=str, ensure_ascii=False)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    return replace_surrogates(text).encode()
