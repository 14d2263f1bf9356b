"""The engine of one episode, which stays usable when the process behind it is lost or makes no progress.

engine 0   prompt | a b c           lost; it had reported a b
engine 1   prompt + a b | c d e     continued there, or on engine 0 after its restart
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from megarl.batch.trajectory import TIME_LIMIT
from megarl.errors import LostEngineError, StalledEngineError
from megarl.rollout.batching_engine import BatchingEngine, EngineFailedError
from megarl.rollout.continuation import continue_after, join, no_tokens
from megarl.rollout.engine import Generation, GenerationRequest
from megarl.rollout.engine_pool import EngineLease
from megarl.rollout.request_clock import TimeLimit

AFTER_LIMIT_SECONDS = 0.01
"""Duration of a request after the time limit, so that an agent that repeats requests does not block other episodes."""


class ContinuingEngine:
    """A `CompletionEngine` that continues a request on another engine if its own is lost or makes no progress.

    Once the time limit of the episode is reached, requests end with the tokens so far and `TIME_LIMIT`, further ones
    without any.
    """

    def __init__(self, lease: EngineLease, limit: TimeLimit, stalls: list[StalledEngineError]) -> None:
        """Use the engine of a group's lease.

        Args:
            limit: of the episode.
            stalls: gets the failures of engines to make progress; the first one of the sample is retried.
        """
        self._group, self._lease, self._limit, self._stalls = lease, lease, limit, stalls
        self._in_flight: dict[str, BatchingEngine] = {}
        """Engines by the ids of their requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_asked = False
        self.has_cut = False
        """Whether a request was ended or refused by the time limit."""
        self.error: EngineFailedError | None = None
        """The error that `generate` has raised."""
        limit.reached.add_done_callback(self._end_requests)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return one completion of the request.

        Raises:
            EngineFailedError: the engine refused the request, or engines made no progress twice.
            WorkerError: a call to the engine failed, with all requests that it sent.
        """
        part, request = no_tokens(), replace(request, priority=self._group.priority)
        if self._limit.is_reached:
            await asyncio.sleep(AFTER_LIMIT_SECONDS)
        elif not self._has_asked:
            self._has_asked = True
            self._limit.stop()  # until the first token
        while not self._limit.is_reached:
            if len(part.token_ids) >= request.sampling.max_new_tokens:
                return replace(part, finish_reason="length")
            engine = await self._lease.engine()
            if self._limit.is_reached:
                break
            try:
                generation = join(part, await self._ask(engine, continue_after(request, part)))
            except LostEngineError as error:
                engine.mark_lost(error)
                part = join(part, self._take_reported(engine, request))
            except StalledEngineError as error:
                self._begin(engine.partial_outputs.abort(request.request_id))
                part = join(part, self._take_reported(engine, request))
                self._count_stall(error)
                request = replace(request, request_id=f"{request.request_id}-retry1")
            except EngineFailedError as error:
                self.error = error
                raise
            else:
                self._limit.start()
                if generation.finish_reason != "abort" or not self._limit.is_reached:
                    return generation
                part = generation
        self.has_cut = True
        return replace(part, finish_reason=TIME_LIMIT)

    async def abort(self, request_id: str) -> None:
        """Abort a request on the engine of the lease."""
        engine = await self._lease.engine()
        await engine.abort(request_id)

    async def _ask(self, engine: BatchingEngine, request: GenerationRequest) -> Generation:
        self._in_flight[request.request_id] = engine
        self._limit.num_requests += 1
        try:
            return await engine.generate(request, self._limit)
        finally:
            self._limit.num_requests -= 1
            del self._in_flight[request.request_id]

    def _take_reported(self, engine: BatchingEngine, request: GenerationRequest) -> Generation:
        """Return what a request that is sent again has sampled, as far as the engine has reported it."""
        self._limit.stop()
        reported = engine.partial_outputs.pop(request.request_id)
        self._group.count_retry(len(reported.token_ids))
        if self._lease is self._group:
            self._lease = self._group.for_sample()
        return reported

    def _count_stall(self, error: StalledEngineError) -> None:
        """Raise an error unless this is the first one of the sample; requests in flight may fail with the same one."""
        if error not in self._stalls:
            self._stalls.append(error)
        if len(self._stalls) > 1:
            self.error = EngineFailedError(str(error))
            raise self.error from error

    def _end_requests(self, _: asyncio.Future[None]) -> None:
        for request_id, engine in self._in_flight.items():
            self._begin(engine.partial_outputs.end(request_id))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
