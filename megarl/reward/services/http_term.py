"""The reward term that asks a service of the user over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, override

from megarl.batch.trajectory import Prompt
from megarl.cluster.workers.dispatch import call_for_all
from megarl.config.reward import HttpRewardConfig
from megarl.reward.services.client import RefusedRequestError, ServiceClient, ServiceError
from megarl.reward.terms import Completion, CompletionTerm, TermError, TermValue, abbreviate, quote, read_result

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
