"""Requests of one process to an engine: in batches, watched for progress, and continued after an interruption.

The requests of one event-loop iteration are a single call. Of those that are unfinished, the engine is asked every few
seconds, in one call, what they have sampled; those that finish before that cost nothing. What the engine has reported
survives its loss.

An engine makes progress if it completes a request, reports new tokens, or reports that a request waits while it samples
others. One that owes completions and shows no such sign for `no_progress_seconds` fails the requests that have waited
for so long.

A completion that was interrupted continues with a new request, whose prompt ends with the tokens sampled so far:

    request          prompt                      max_new_tokens = 8
    interrupted      prompt | a b c
    new request      prompt + a b c              max_new_tokens = 5, same id and seed
    its completion                    d e
    joined           prompt | a b c   d e        log-probabilities and versions of both parts

The noise that an engine samples with is a function of the seed and the position in the sequence, so that a
deterministic engine samples the tokens that it would have sampled without the interruption. Their log-probabilities
may differ by rounding: the keys and values of a, b and c are computed in one pass instead of token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from megarl.batch.routes import join_routes
from megarl.engines.engine import UNFINISHED, FinishedRequest, Generation, GenerationEngine, GenerationRequest
from megarl.engines.request_clock import ClockTimer, RequestClock, TimeLimit
from megarl.errors import LostEngineError, MegarlError, StalledEngineError, WorkerError


def continue_after(request: GenerationRequest, part: Generation) -> GenerationRequest:
    """Return the request for what is left of a completion of `request` after its first tokens, `part`."""
    left = request.sampling.max_new_tokens - len(part.token_ids)
    assert left > 0, f"a completion of {len(part.token_ids)} tokens has ended"
    return replace(
        request,
        token_ids=(*request.token_ids, *part.token_ids.tolist()),
        sampling=replace(request.sampling, max_new_tokens=left),
        num_routed=request.num_routed + (0 if part.routes is None else len(part.routes)),
    )


def join(part: Generation, rest: Generation) -> Generation:
    """Return the completion that consists of its first tokens, `part`, and the rest, with which it ends."""
    return Generation(
        token_ids=np.concatenate([part.token_ids, rest.token_ids]),
        logprobs=np.concatenate([part.logprobs, rest.logprobs]),
        policy_versions=np.concatenate([part.policy_versions, rest.policy_versions]),
        finish_reason=rest.finish_reason,
        routes=join_routes(part.routes, rest.routes),
    )


def no_tokens() -> Generation:
    """Return the first tokens of a completion of which none was sampled yet."""
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason=UNFINISHED,
    )


def tokens_from(generation: Generation, start: int) -> Generation:
    """Return the tokens of a completion from `start` on, without routes."""
    return replace(
        generation,
        token_ids=generation.token_ids[start:],
        logprobs=generation.logprobs[start:],
        policy_versions=generation.policy_versions[start:],
        routes=None,
    )


REPORT_SECONDS = 5.0
"""Shortest time between two reports of an engine, and age from which requests are in them; what was sampled after the
last one is lost with the engine."""

MAX_REPORT_DELAY = 0.5
"""Reports come at random times, later by up to this share, so that an engine is not asked by all workers at once."""

REPORT_TIMEOUT_SECONDS = 30.0
"""How long to wait for a report before the engine is asked again."""

LATE_SECONDS = 10.0
"""If the check for progress is later than this, the process was blocked: it then first receives, for as long, what has
arrived."""

ABORT_GRACE_SECONDS = 10.0
"""How long to wait for an engine to answer a request that was aborted."""

_random = random.Random()
"""Not the one of the module `random`, which rewards and agents may seed."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """What is known of a request in flight; times are those of the clock."""

    reply: asyncio.Future[Generation]
    limit: TimeLimit | None
    """Of the request's episode."""
    sent_at: float
    waited_until: float
    """When the request was last known to wait in the queue."""
    generation: Generation = field(default_factory=no_tokens)


class PartialOutputs:
    """The unfinished requests of one engine, with their tokens as of its last report."""

    def __init__(
        self,
        engine: GenerationEngine,
        clock: RequestClock | None = None,
        *,
        name: str = "the engine",
        no_progress_seconds: float = inf,
    ) -> None:
        """Args:
        clock: stops while engines are paused.
        name: of the engine, in messages.
        no_progress_seconds: longest time without a sign of progress.
        """
        self._engine, self._clock, self._name = engine, clock or RequestClock(), name
        self._no_progress_seconds = no_progress_seconds
        self._parts: dict[str, _Part] = {}
        """By id of the requests in flight, in the order in which they were sent."""
        self._task: asyncio.Task[None] | None = None
        self._progress_at = -inf
        """When the engine last showed progress."""
        self._stalled_at = -inf
        """When requests failed for want of progress, of which the engine has shown none since."""
        self._watch = ClockTimer(self._clock, self._check_progress)
        self._next_check = inf

    @property
    def num_tokens(self) -> int:
        """Number of tokens reported of all requests in flight."""
        return sum(len(part.generation.token_ids) for part in self._parts.values())

    @property
    def is_stalled(self) -> bool:
        """Whether requests have failed because of the engine within the last `no_progress_seconds`."""
        return self._clock.time() - self._stalled_at < self._no_progress_seconds

    def add(self, request_id: str, reply: asyncio.Future[Generation], limit: TimeLimit | None = None) -> None:
        """Have the tokens of a request reported until it is popped.

        Args:
            reply: gets a `StalledEngineError` if the engine makes no progress.
            limit: starts with the first token that is reported. If it is reached already, the request has ended.
        """
        if limit is not None and limit.is_reached:
            reply.set_result(replace(no_tokens(), finish_reason="abort"))
        now = self._clock.time()
        self._parts[request_id] = _Part(reply=reply, limit=limit, sent_at=now, waited_until=now)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._collect())
        if not self._watch.is_running and self._no_progress_seconds < inf:
            self._check_at(now + self._no_progress_seconds)

    def pop(self, request_id: str) -> Generation:
        """Return the request's tokens as of the last report, and forget it."""
        part = self._parts.pop(request_id, None)
        return no_tokens() if part is None else part.generation

    def note_progress(self) -> None:
        """Record that the engine has shown a sign of progress."""
        self._progress_at, self._stalled_at = self._clock.time(), -inf

    async def end(self, request_id: str) -> None:
        """Abort a request. If the engine does not answer that, the request ends with the tokens that are known."""
        part = self._parts.get(request_id)
        if part is None:
            return
        try:
            await self.abort(request_id)
            await self._clock.wait([part.reply], ABORT_GRACE_SECONDS)
        finally:
            if not part.reply.done():
                part.reply.set_result(replace(part.generation, finish_reason="abort"))

    async def abort(self, request_id: str) -> None:
        """Abort a request on the engine, which may not answer."""
        with contextlib.suppress(TimeoutError, MegarlError):
            async with self._clock.timeout(ABORT_GRACE_SECONDS):
                await self._engine.abort(request_id)

    async def _collect(self) -> None:
        """Ask for reports until no request is in flight."""
        while self._parts:
            await asyncio.sleep(REPORT_SECONDS * _random.uniform(1, 1 + MAX_REPORT_DELAY))
            sent_before = self._clock.time() - REPORT_SECONDS
            asked = {request_id: part for request_id, part in self._parts.items() if part.sent_at <= sent_before}
            if not asked:
                continue
            known = {request_id: len(part.generation.token_ids) for request_id, part in asked.items()}
            # a request fails with the same error, if it lasts
            with contextlib.suppress(MegarlError, TimeoutError):
                async with asyncio.timeout(REPORT_TIMEOUT_SECONDS):
                    self._take(asked, await self._engine.partial_outputs(known))

    def _take(self, asked: dict[str, _Part], report: dict[str, Generation]) -> None:
        for request_id, new in report.items():
            asked[request_id].generation = join(asked[request_id].generation, new)
        if report:
            self.note_progress()
        for part in asked.values():
            if part.limit is None:
                continue
            if len(part.generation.token_ids):
                part.limit.start()
            elif self._progress_at > part.waited_until:
                part.limit.leave_out(self._progress_at - part.waited_until)
                part.waited_until = self._progress_at

    def _check_progress(self) -> None:
        """Fail the requests that have waited too long for a sign of progress; then watch those that are left."""
        now, seconds = self._clock.time(), self._no_progress_seconds
        if now - self._next_check > LATE_SECONDS:
            self._check_at(now + LATE_SECONDS)
            return
        waiting = [part for part in self._parts.values() if not part.reply.done()]
        overdue = [part for part in waiting if self._due(part) <= now]
        if overdue:
            self._stalled_at = now
            error = StalledEngineError(
                f"{self._name} has shown no progress for {seconds:g} s (rollout.no_progress_seconds)"
            )
            for part in overdue:
                part.reply.set_exception(error)
        left = [self._due(part) for part in waiting if not part.reply.done()]
        if left:
            self._check_at(min(left))

    def _check_at(self, when: float) -> None:
        self._next_check = when
        self._watch.start(max(0.0, when - self._clock.time()))

    def _due(self, part: _Part) -> float:
        return max(part.sent_at, self._progress_at) + self._no_progress_seconds


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
