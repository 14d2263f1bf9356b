"""Requests that agents issue in the same turn of the event loop travel to the engine in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.errors import LostEngineError
from megarl.rollout.engine import Generation, GenerationEngine, GenerationRequest


class CoalescingEngine:
    """A `GenerationEngine` in front of another one.

    A call to an engine in another process costs about a millisecond of CPU on either side, more than a small model
    spends on a token. The price: a coalesced request returns with the slowest of its batch.
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Generation]]] = []
        self._flights: set[asyncio.Task[None]] = set()
        self._flying: dict[asyncio.Future[Generation], None] = {}
        """In the order of departure."""
        self.lost: LostEngineError | None = None
        """Why nothing more is asked of it."""
        self.late_answers = 0
        """Completions that nobody waited for any more."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """The completion, once all of those that were asked for in the same turn are done.

        Raises:
            LostEngineError: the engine was given up meanwhile, or before.
        """
        if self.lost is not None:
            raise self.lost
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._depart)
        future: asyncio.Future[Generation] = loop.create_future()
        self._waiting.append((request, future))
        return await future

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """As the engine behind does it."""
        if self.lost is not None:
            raise self.lost
        return await self._engine.generate_many(requests)

    async def abort(self, request_id: str) -> None:
        """As the engine behind does it."""
        await self._engine.abort(request_id)

    def lose(self, error: LostEngineError) -> None:
        """Raise `error` in all callers of `generate`, also in those to come; what the engine yet answers is dropped."""
        self.lost = self.lost or error
        batch, self._waiting = self._waiting, []
        for future in [*self._flying, *(future for _, future in batch)]:
            if not future.done():
                future.set_exception(error)

    def _depart(self) -> None:
        batch, self._waiting = self._waiting, []
        if not batch:
            return  # the engine was given up in this turn
        flight = asyncio.get_running_loop().create_task(self._fly(batch))
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)

    async def _fly(self, batch: list[tuple[GenerationRequest, asyncio.Future[Generation]]]) -> None:
        self._flying.update((future, None) for _, future in batch)
        try:
            generations = await self._engine.generate_many([request for request, _ in batch])
        except Exception as e:  # noqa: BLE001 -- raised again in each of the callers
            for _, future in batch:
                if not future.done():
                    future.set_exception(e)
            return
        finally:
            for _, future in batch:
                del self._flying[future]
        for (_, future), generation in zip(batch, generations, strict=True):
            if future.done():
                self.late_answers += 1
            else:
                future.set_result(generation)
