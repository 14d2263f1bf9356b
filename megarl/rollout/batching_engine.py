"""Batches the generation requests of one event-loop iteration into a single call to the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from megarl.errors import LostEngineError, MegarlError, StalledEngineError, WorkerError
from megarl.rollout.engine import FinishedRequest, Generation, GenerationEngine, GenerationRequest
from megarl.rollout.partial_outputs import PartialOutputs
from megarl.rollout.request_clock import TimeLimit


class EngineFailedError(WorkerError):
    """An engine refused a request, sampled nothing, or made no progress twice: its episode fails, and no other one."""


class BatchingEngine:
    """Wraps a `GenerationEngine` and sends it the `generate` calls of one event-loop iteration together.

    A call to an engine in another process costs about a millisecond of CPU on either side, more than a small model
    spends on a token. Each request returns when it is done, not when its batch is.
    """

    def __init__(self, engine: GenerationEngine, partial_outputs: PartialOutputs | None = None) -> None:
        """`partial_outputs`: those of the engine; None: an engine that is not watched for progress."""
        self._engine = engine
        self._queue: list[tuple[GenerationRequest, asyncio.Future[Generation]]] = []
        self._send_tasks: set[asyncio.Task[None]] = set()
        self._in_flight: dict[asyncio.Future[Generation], str] = {}
        """Futures of requests that were sent, in the order of sending, with the request ids."""
        self._aborts: dict[str, asyncio.Task[None]] = {}
        """By request id, aborts that the engine has not confirmed."""
        self.lost_error: LostEngineError | None = None
        """Why the engine was marked lost; None while it is in use."""
        self.num_stale_replies = 0
        """Number of completions that arrived when no caller was waiting for them any more."""
        self.partial_outputs = partial_outputs or PartialOutputs(engine)
        """Tokens of the requests of `generate`. A request that fails stays until its caller pops it."""

    @property
    def aborts(self) -> list[asyncio.Task[None]]:
        """Aborts of cancelled requests that the engine has not confirmed."""
        return list(self._aborts.values())

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has made no progress and is to be avoided."""
        return self.partial_outputs.is_stalled

    async def generate(self, request: GenerationRequest, limit: TimeLimit | None = None) -> Generation:
        """Return the completion. If the caller is cancelled, the engine aborts the request.

        Args:
            limit: time limit of the request's episode, which the first token starts.

        Raises:
            LostEngineError: the engine is marked lost, or is marked lost before it replies.
            StalledEngineError: the engine makes no progress.
            EngineFailedError: the engine refused the request.
            WorkerError: the call to the engine failed, with all requests that it sent.
        """
        if (abort := self._aborts.get(request.request_id)) is not None:
            await asyncio.wait([abort])  # it must not end the new request
        if self.lost_error is not None:
            raise self.lost_error
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._flush)
        future: asyncio.Future[Generation] = loop.create_future()
        self._queue.append((request, future))
        self.partial_outputs.add(request.request_id, future, limit)
        try:
            generation = await future
        except (LostEngineError, StalledEngineError):
            raise  # its tokens are kept for the caller
        except BaseException:
            self.partial_outputs.pop(request.request_id)
            if future in self._in_flight:
                self._begin_abort(request.request_id)
            raise
        self.partial_outputs.pop(request.request_id)
        return generation

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Send the requests to the wrapped engine in a call of their own.

        Raises:
            LostEngineError: the engine is marked lost.
        """
        if self.lost_error is not None:
            raise self.lost_error
        return await self._engine.generate_many(requests)

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        """Send the requests to the wrapped engine in a call of their own; raises as `generate_many`."""
        if self.lost_error is not None:
            raise self.lost_error
        async for finished in self._engine.stream(requests):
            yield finished

    async def abort(self, request_id: str) -> None:
        """Abort a request on the wrapped engine, unless that was done when its caller was cancelled."""
        await asyncio.sleep(0)  # a caller that has just been cancelled begins the abort
        queued = [future for request, future in self._queue if request.request_id == request_id]
        sent = [future for future, sent_id in self._in_flight.items() if sent_id == request_id]
        if any(not future.done() for future in (*queued, *sent)):
            await self._engine.abort(request_id)
        elif (abort := self._aborts.get(request_id)) is not None:
            await asyncio.wait([abort])

    def _begin_abort(self, request_id: str) -> None:
        """Abort a request whose caller has been cancelled, and does not wait."""

        async def abort() -> None:
            with contextlib.suppress(MegarlError):  # the engine is lost, and the request with it
                await self._engine.abort(request_id)

        task = self._aborts[request_id] = asyncio.get_running_loop().create_task(abort())
        task.add_done_callback(lambda _: self._aborts.pop(request_id, None))

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
        batch = [(request, future) for request, future in batch if not future.done()]  # without cancelled callers
        if not batch:
            return
        futures = [future for _, future in batch]
        self._in_flight |= {future: request.request_id for request, future in batch}
        try:
            async for finished in self._engine.stream([request for request, _ in batch]):
                for index, outcome in finished:
                    self._resolve(futures[index], outcome)
        except Exception as e:  # noqa: BLE001 -- raised again in each of the callers
            for future in futures:
                if not future.done():
                    future.set_exception(e)
        finally:
            for future in futures:
                self._in_flight.pop(future, None)

    def _resolve(self, future: asyncio.Future[Generation], outcome: Generation | MegarlError) -> None:
        self._in_flight.pop(future, None)
        if isinstance(outcome, MegarlError) or outcome.finish_reason != "abort":  # an engine that is stuck may abort
            self.partial_outputs.note_progress()
        if future.done():
            self.num_stale_replies += 1
        elif isinstance(outcome, MegarlError):
            is_lost = isinstance(outcome, LostEngineError)
            future.set_exception(outcome if is_lost else EngineFailedError(str(outcome)))
        else:
            future.set_result(outcome)
