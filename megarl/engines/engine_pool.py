"""The engines of one rollout worker: requests in batches, watched for progress, and continued after an interruption.

episode --- EpisodeEngine ---> PooledEngine ---> engine 0      requests of one event-loop iteration in one call
                  '--------- after a loss -----> engine 1

`EpisodeEngine` is the engine that an episode sees, which stays usable when the process behind it is lost or makes no
progress. It uses the engine that its group leases (`EngineLease`), so that the prompt's KV cache is computed once, and
after a failure the one with the fewest samples (`EnginePool`).

An engine is asked every few seconds, in one call, what its unfinished requests have sampled; requests that finish
before that cost nothing. What it has reported survives its loss. It makes progress if it completes a request, reports
new tokens, or reports that a request waits while it samples others. If it shows no such sign for `no_progress_seconds`,
the requests that have waited for so long fail.

A completion that was interrupted continues with a new request, whose prompt ends with the tokens sampled so far:

    engine 0   request          prompt                      max_new_tokens = 8
               reported         prompt | a b c              then the engine is lost
    engine 1   new request      prompt + a b c              max_new_tokens = 5, same id and seed
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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from megarl.batch.trajectory import TIME_LIMIT
from megarl.engines.engine import Generation, GenerationEngine, GenerationRequest, continue_after, join, no_tokens
from megarl.engines.request_clock import ClockTimer, RequestClock, TimeLimit
from megarl.errors import LostEngineError, MegarlError, StalledEngineError, WorkerError

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

ABORT_SECONDS = 5.0
"""How long a worker that shuts down waits for engines to abort its requests."""


class EngineFailedError(WorkerError):
    """An engine refused a request, sampled nothing, or made no progress twice: its episode fails, and no other one."""


@dataclass(slots=True, kw_only=True)
class _PendingRequest:
    """A request to an engine; times are those of the clock."""

    request: GenerationRequest
    reply: asyncio.Future[Generation]
    limit: TimeLimit | None
    """Of the request's episode."""
    sent_at: float
    waited_until: float
    """When the request was last known to wait in the queue."""
    reported: Generation = field(default_factory=no_tokens)
    """Its tokens as of the engine's last report."""
    is_in_flight: bool = False
    """Whether the engine was sent the request and has not answered it."""


class PooledEngine:
    """An engine, and the requests of this process to it; an engine that was restarted gets a new one.

    The requests of one event-loop iteration are sent together: a call to another process costs about a millisecond of
    CPU on either side, more than a small model spends on a token. Each request returns when it is done, not when its
    batch is.
    """

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
        self._pending: dict[str, _PendingRequest] = {}
        """By id, in the order in which they were sent. One that the engine has failed stays until `take_reported`."""
        self._queue: list[_PendingRequest] = []
        """Those of the current event-loop iteration."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborts: dict[str, asyncio.Task[None]] = {}
        """By request id, aborts of cancelled requests that the engine has not confirmed."""
        self._reports: asyncio.Task[None] | None = None
        self._progress_at = -inf
        """When the engine last showed progress."""
        self._stalled_at = -inf
        """When requests failed for want of progress, of which the engine has shown none since."""
        self._watch = ClockTimer(self._clock, self._check_progress)
        self._next_check = inf
        self.outstanding = 0
        """Number of samples that the engine is generating for this worker."""
        self.lost_error: LostEngineError | None = None
        """Why the engine was marked lost; None while it is in use."""

    @property
    def is_stalled(self) -> bool:
        """Whether requests have failed because of the engine within the last `no_progress_seconds`."""
        return self._clock.time() - self._stalled_at < self._no_progress_seconds

    @property
    def is_live(self) -> bool:
        """Whether the engine is neither lost nor stalled."""
        return self.lost_error is None and not self.is_stalled

    @property
    def aborts(self) -> list[asyncio.Task[None]]:
        """Aborts of cancelled requests that the engine has not confirmed."""
        return list(self._aborts.values())

    async def generate(self, request: GenerationRequest, limit: TimeLimit | None = None) -> Generation:
        """Return the completion. If the caller is cancelled, the engine aborts the request.

        Args:
            limit: time limit of the request's episode, which the first token starts. If it is reached already, the
                request has ended.

        Raises:
            LostEngineError: the engine is marked lost, or is marked lost before it replies; `take_reported` returns
                what it has sampled.
            StalledEngineError: the engine makes no progress; as above.
            EngineFailedError: the engine refused the request.
            WorkerError: the call to the engine failed, with all requests that it sent.
        """
        request_id = request.request_id
        if (abort := self._aborts.get(request_id)) is not None:
            await asyncio.wait([abort])  # it must not end the new request
        if self.lost_error is not None:
            raise self.lost_error
        pending = self._enqueue(request, limit)
        try:
            generation = await pending.reply
        except (LostEngineError, StalledEngineError):
            raise
        except BaseException:
            self._pending.pop(request_id, None)
            if pending.is_in_flight:
                self._begin_abort(request_id)
            raise
        self._pending.pop(request_id, None)
        return generation

    def take_reported(self, request_id: str) -> Generation:
        """Return the tokens of a request that the engine has failed, as of its last report, and forget the request."""
        pending = self._pending.pop(request_id, None)  # an engine that was lost before was not sent the request
        return no_tokens() if pending is None else pending.reported

    async def abort(self, request_id: str) -> None:
        """Abort a request, unless that was done when its caller was cancelled."""
        await asyncio.sleep(0)  # a caller that has just been cancelled begins the abort
        pending = self._pending.get(request_id)
        if pending is not None and not pending.reply.done():
            await self._engine.abort(request_id)
        elif (abort := self._aborts.get(request_id)) is not None:
            await asyncio.wait([abort])

    async def try_abort(self, request_id: str) -> None:
        """Abort a request on the engine, which may not answer."""
        with contextlib.suppress(TimeoutError, MegarlError):
            async with self._clock.timeout(ABORT_GRACE_SECONDS):
                await self._engine.abort(request_id)

    async def end(self, request_id: str) -> None:
        """Abort a request. If the engine does not answer that, the request ends with the tokens that are known."""
        pending = self._pending.get(request_id)
        if pending is None:
            return
        try:
            await self.try_abort(request_id)
            await self._clock.wait([pending.reply], ABORT_GRACE_SECONDS)
        finally:
            if not pending.reply.done():
                pending.reply.set_result(replace(pending.reported, finish_reason="abort"))

    def mark_lost(self, error: LostEngineError) -> None:
        """Raise `error` in all current and future callers of `generate`; later replies of the engine are dropped."""
        self.lost_error = self.lost_error or error
        self._queue = []
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)

    def _enqueue(self, request: GenerationRequest, limit: TimeLimit | None) -> _PendingRequest:
        """Send a request at the end of this event-loop iteration; watch it, and have its tokens reported."""
        loop, now = asyncio.get_running_loop(), self._clock.time()
        pending = _PendingRequest(
            request=request, reply=loop.create_future(), limit=limit, sent_at=now, waited_until=now
        )
        if limit is not None and limit.is_reached:
            pending.reply.set_result(replace(no_tokens(), finish_reason="abort"))
        if not self._queue:
            loop.call_soon(self._flush)
        self._queue.append(pending)
        self._pending[request.request_id] = pending
        if self._reports is None or self._reports.done():
            self._reports = loop.create_task(self._collect_reports())
        if not self._watch.is_running and self._no_progress_seconds < inf:
            self._check_at(now + self._no_progress_seconds)
        return pending

    def _flush(self) -> None:
        batch, self._queue = self._queue, []
        if not batch:
            return  # the engine was marked lost in this event-loop iteration
        task = asyncio.get_running_loop().create_task(self._send(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, batch: list[_PendingRequest]) -> None:
        batch = [pending for pending in batch if not pending.reply.done()]  # without cancelled callers
        if not batch:
            return
        for pending in batch:
            pending.is_in_flight = True
        try:
            async for finished in self._engine.stream([pending.request for pending in batch]):
                for index, outcome in finished:
                    self._resolve(batch[index], outcome)
        except Exception as e:  # noqa: BLE001 -- raised again in each of the callers
            for pending in batch:
                if not pending.reply.done():
                    pending.reply.set_exception(e)
        finally:
            for pending in batch:
                pending.is_in_flight = False

    def _resolve(self, pending: _PendingRequest, outcome: Generation | MegarlError) -> None:
        pending.is_in_flight = False
        if isinstance(outcome, MegarlError) or outcome.finish_reason != "abort":  # an engine that is stuck may abort
            self._note_progress()
        if pending.reply.done():
            return  # no caller waits for it any more
        if isinstance(outcome, MegarlError):
            is_lost = isinstance(outcome, LostEngineError)
            pending.reply.set_exception(outcome if is_lost else EngineFailedError(str(outcome)))
        else:
            pending.reply.set_result(outcome)

    def _begin_abort(self, request_id: str) -> None:
        """Abort a request whose caller has been cancelled, and does not wait."""

        async def abort() -> None:
            with contextlib.suppress(MegarlError):  # the engine is lost, and the request with it
                await self._engine.abort(request_id)

        task = self._aborts[request_id] = asyncio.get_running_loop().create_task(abort())
        task.add_done_callback(lambda _: self._aborts.pop(request_id, None))

    async def _collect_reports(self) -> None:
        """Ask for reports until no request is pending."""
        while self._pending:
            await asyncio.sleep(REPORT_SECONDS * _random.uniform(1, 1 + MAX_REPORT_DELAY))
            sent_before = self._clock.time() - REPORT_SECONDS
            asked = {name: pending for name, pending in self._pending.items() if pending.sent_at <= sent_before}
            if not asked:
                continue
            known = {name: len(pending.reported.token_ids) for name, pending in asked.items()}
            # a request fails with the same error, if it lasts
            with contextlib.suppress(MegarlError, TimeoutError):
                async with asyncio.timeout(REPORT_TIMEOUT_SECONDS):
                    self._take_report(asked, await self._engine.partial_outputs(known))

    def _take_report(self, asked: dict[str, _PendingRequest], report: dict[str, Generation]) -> None:
        for request_id, new in report.items():
            asked[request_id].reported = join(asked[request_id].reported, new)
        if report:
            self._note_progress()
        for pending in asked.values():
            if pending.limit is None:
                continue
            if len(pending.reported.token_ids):
                pending.limit.start()
            elif self._progress_at > pending.waited_until:
                pending.limit.leave_out(self._progress_at - pending.waited_until)
                pending.waited_until = self._progress_at

    def _note_progress(self) -> None:
        self._progress_at, self._stalled_at = self._clock.time(), -inf

    def _check_progress(self) -> None:
        """Fail the requests that have waited too long for a sign of progress; then watch those that are left."""
        now, seconds = self._clock.time(), self._no_progress_seconds
        if now - self._next_check > LATE_SECONDS:
            self._check_at(now + LATE_SECONDS)
            return
        waiting = [pending for pending in self._pending.values() if not pending.reply.done()]
        overdue = [pending for pending in waiting if self._due(pending) <= now]
        if overdue:
            self._stalled_at = now
            error = StalledEngineError(
                f"{self._name} has shown no progress for {seconds:g} s (rollout.no_progress_seconds)"
            )
            for pending in overdue:
                pending.reply.set_exception(error)
        left = [self._due(pending) for pending in waiting if not pending.reply.done()]
        if left:
            self._check_at(min(left))

    def _check_at(self, when: float) -> None:
        self._next_check = when
        self._watch.start(max(0.0, when - self._clock.time()))

    def _due(self, pending: _PendingRequest) -> float:
        return max(pending.sent_at, self._progress_at) + self._no_progress_seconds


class EnginePool:
    """All engines that a rollout worker may use, some of which may be lost or not started yet."""

    def __init__(
        self,
        engines: Sequence[GenerationEngine | None],
        clock: RequestClock | None = None,
        *,
        no_progress_seconds: float = inf,
    ) -> None:
        """Create a pool.

        Args:
            engines: None for an engine that has not started yet; `replace` adds it later.
            clock: stops while engines are paused.
            no_progress_seconds: longest time without a sign of progress of an engine that owes completions.
        """
        self._clock, self._no_progress_seconds = clock or RequestClock(), no_progress_seconds
        self._engines = [None if each is None else self._make(number, each) for number, each in enumerate(engines)]
        self._engine_available = asyncio.Event()

    @property
    def outstanding(self) -> list[int]:
        """Number of samples that each engine is generating, by engine index."""
        return [0 if engine is None else engine.outstanding for engine in self._engines]

    def mark_lost(self, index: int, error: LostEngineError) -> None:
        """Stop using an engine: its requests are retried on others, and its later replies are dropped."""
        engine = self._engines[index]
        if engine is not None:
            engine.mark_lost(error)

    def replace(self, index: int, engine: GenerationEngine) -> None:
        """Use `engine` as engine `index` from now on."""
        self.mark_lost(index, LostEngineError(f"engine {index} was replaced"))
        self._engines[index] = self._make(index, engine)
        self._engine_available.set()

    async def finish_aborts(self) -> None:
        """Wait until the engines have confirmed the aborts of cancelled requests, for at most `ABORT_SECONDS`."""
        aborts = [task for engine in self._engines if engine is not None for task in engine.aborts]
        if aborts:
            await asyncio.wait(aborts, timeout=ABORT_SECONDS)

    def _make(self, index: int, engine: GenerationEngine) -> PooledEngine:
        return PooledEngine(engine, self._clock, name=f"engine {index}", no_progress_seconds=self._no_progress_seconds)

    def live(self, index: int) -> PooledEngine | None:
        """Return engine `index`; None if it is lost, has not started, or makes no progress."""
        engine = self._engines[index]
        return engine if engine is not None and engine.is_live else None

    async def least_loaded(self, group_id: int) -> PooledEngine:
        """Return the live engine with the fewest outstanding samples; waits until at least one is live.

        Of equally loaded ones, consecutive groups take consecutive ones: the groups of other workers, too, which this
        one knows nothing of. An engine without progress is used if there is no other.
        """
        while True:
            usable = [engine for engine in self._engines if engine is not None and engine.lost_error is None]
            if usable:
                usable = [engine for engine in usable if not engine.is_stalled] or usable
                first = (group_id + 1) % len(usable)
                return min(usable[first:] + usable[:first], key=lambda engine: engine.outstanding)
            self._engine_available.clear()
            await self._engine_available.wait()


class EngineLease:
    """Keeps all samples of a group on one engine, so that the prompt's KV cache is computed once.

    If that engine is lost, each of its requests continues on an engine of its own: all would be too many for one.
    """

    def __init__(
        self, pool: EnginePool, num_samples: int, preferred: int | None = None, *, group_id: int = 0, priority: int = 0
    ) -> None:
        """Args:
        preferred: index of the engine to use while it is live; None: the one with the fewest samples.
        group_id: chooses among engines with equally few samples.
        priority: of the group's requests.
        """
        self._pool, self._num_samples, self._preferred = pool, num_samples, preferred
        self._group_id, self.priority = group_id, priority
        self._engine: PooledEngine | None = None
        self._lock = asyncio.Lock()
        self._of_samples: list[EngineLease] = []
        self.num_retried = 0
        """Number of the group's requests that were sent again because their engine was lost."""
        self.num_kept_tokens = 0
        """Number of tokens that these requests had sampled and continued from."""

    def count_retry(self, kept_tokens: int) -> None:
        """Count a request that is sent again, and the tokens that it continues from."""
        self.num_retried += 1
        self.num_kept_tokens += kept_tokens

    async def engine(self) -> PooledEngine:
        """Return the group's engine; if it is lost or stalled, lease another one. Waits only if no engine is live."""
        async with self._lock:
            if self._engine is None or not self._engine.is_live:
                self._give_back()
                preferred = None if self._preferred is None else self._pool.live(self._preferred)
                self._engine = preferred or await self._pool.least_loaded(self._group_id)
                self._engine.outstanding += self._num_samples
            return self._engine

    def for_sample(self) -> EngineLease:
        """Return a lease for one sample of the group, whose engine was lost."""
        lease = EngineLease(self._pool, 1, group_id=self._group_id + len(self._of_samples), priority=self.priority)
        self._of_samples.append(lease)
        return lease

    def release(self) -> None:
        """Give the engine back and subtract the group's samples from its load; also those of `for_sample`."""
        for lease in self._of_samples:
            lease.release()
        self._give_back()

    def _give_back(self) -> None:
        if self._engine is not None:
            self._engine.outstanding -= self._num_samples
        self._engine = None


AFTER_LIMIT_SECONDS = 0.01
"""Duration of a request after the time limit, so that an agent that repeats requests does not block other episodes."""


class EpisodeEngine:
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
        self._in_flight: dict[str, PooledEngine] = {}
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
                self._begin(engine.try_abort(request.request_id))
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

    async def _ask(self, engine: PooledEngine, request: GenerationRequest) -> Generation:
        self._in_flight[request.request_id] = engine
        self._limit.num_requests += 1
        try:
            return await engine.generate(request, self._limit)
        finally:
            self._limit.num_requests -= 1
            del self._in_flight[request.request_id]

    def _take_reported(self, engine: PooledEngine, request: GenerationRequest) -> Generation:
        """Return what a request that is sent again has sampled, as far as the engine has reported it."""
        self._limit.stop()
        reported = engine.take_reported(request.request_id)
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
            self._begin(engine.end(request_id))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
