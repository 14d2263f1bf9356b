"""Batches the generation requests of one event-loop iteration into a single call to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.errors import LostEngineError
from megarl.rollout.engine import Generation, GenerationEngine, GenerationRequest


class BatchingEngine:
    """Wraps a `GenerationEngine` and sends it concurrent `generate` calls as one `generate_many` call.

    A call to an engine in another process costs about a millisecond of CPU on either side, more than a small model
    spends on a token. The drawback: a request returns only when the slowest request of its batch is done.
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._queue: list[tuple[GenerationRequest, asyncio.Future[Generation]]] = []
        self._send_tasks: set[asyncio.Task[None]] = set()
        self._in_flight: dict[asyncio.Future[Generation], None] = {}
        """Futures of requests that were sent, in the order of sending."""
        self.lost_error: LostEngineError | None = None
        """Why the engine was marked lost; None while it is in use."""
        self.num_stale_replies = 0
        """Number of completions that arrived when no caller was waiting for them any more."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the completion, once all requests of the same event-loop iteration are done.

        Raises:
            LostEngineError: the engine is marked lost, or is marked lost before it replies.
        """
        if self.lost_error is not None:
            raise self.lost_error
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._flush)
        future: asyncio.Future[Generation] = loop.create_future()
        self._queue.append((request, future))
        return await future

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Send the requests to the wrapped engine in a call of their own.

        Raises:
            LostEngineError: the engine is marked lost.
        """
        if self.lost_error is not None:
            raise self.lost_error
        return await self._engine.generate_many(requests)

    async def abort(self, request_id: str) -> None:
        """Abort a request on the wrapped engine."""
        await self._engine.abort(request_id)

    def mark_lost(self, error: LostEngineError) -> None:
        """Raise `error` in all current and future callers of `generate`; later replies of the engine are dropped."""
        self.lost_error = self.lost_error or error
        batch, self._queue = self._queue, []
        for future in [*self._in_flight, *(future for _, future in batch)]:
            if not future.done():
                future.set_exception(error)

    def _flush(self) -> None:
        batch, self._queue = self._queue, []
        if not batch:
            return  # the engine was marked lost in this event-loop iteration
        task = asyncio.get_running_loop().create_task(self._send(batch))
        self._send_tasks.add(task)
        task.add_done_callback(self._send_tasks.discard)

    async def _send(self, batch: list[tuple[GenerationRequest, asyncio.Future[Generation]]]) -> None:
        self._in_flight.update((future, None) for _, future in batch)
        try:
            generations = await self._engine.generate_many([request for request, _ in batch])
        except Exception as e:  # noqa: BLE001 -- raised again in each of the callers
            for _, future in batch:
                if not future.done():
                    future.set_exception(e)
            return
        finally:
            for _, future in batch:
                del self._in_flight[future]
        for (_, future), generation in zip(batch, generations, strict=True):
            if future.done():
                self.num_stale_replies += 1
            else:
                future.set_result(generation)
