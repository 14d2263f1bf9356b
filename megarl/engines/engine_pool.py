"""The engines of one rollout worker: load balancing, and retries on another engine when one is lost.

group A   engine 0 ---- LostEngineError ---.
                                           '--> engine 1 (or engine 0 after its restart)   same request ids and seeds,
                                                after the tokens that engine 0 has reported

To an episode this is one engine, which stays usable when the process behind it is lost or makes no progress:

engine 0   prompt | a b c           lost; it had reported a b
engine 1   prompt + a b | c d e     continued there, or on engine 0 after its restart
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from megarl.batch.trajectory import TIME_LIMIT
from megarl.engines.batching_engine import (
    BatchingEngine,
    EngineFailedError,
    PartialOutputs,
    continue_after,
    join,
    no_tokens,
)
from megarl.engines.engine import Generation, GenerationEngine, GenerationRequest
from megarl.engines.request_clock import RequestClock, TimeLimit
from megarl.errors import LostEngineError, StalledEngineError

ABORT_SECONDS = 5.0
"""How long a worker that shuts down waits for engines to abort its requests."""


@dataclass(slots=True, eq=False)
class EngineSlot:
    """An engine and its current load; an engine that was restarted gets a new slot."""

    engine: BatchingEngine
    outstanding: int = 0
    """Number of samples that the engine is generating for this worker."""


class EnginePool:
    """All engines that a rollout worker may use, some of which may be lost or not started yet."""

    def __init__(
        self,
        engines: Sequence[GenerationEngine | None],
        clock: RequestClock | None = None,
        *,
        no_progress_seconds: float = inf,
    ) -> None:
        """Create a slot for each engine.

        Args:
            engines: None for an engine that has not started yet; `replace` adds it later.
            clock: stops while engines are paused.
            no_progress_seconds: longest time without a sign of progress of an engine that owes completions.
        """
        self._clock, self._no_progress_seconds = clock or RequestClock(), no_progress_seconds
        self._slots = [None if each is None else self._make_slot(number, each) for number, each in enumerate(engines)]
        self._engine_available = asyncio.Event()
        self._replaced_engines: list[BatchingEngine] = []
        """Lost engines that were replaced; they may still reply."""
        self.num_retried = 0
        """Number of requests that were sent again because their engine was lost."""
        self.num_kept_tokens = 0
        """Number of tokens that these requests had sampled and continued from."""

    @property
    def outstanding(self) -> list[int]:
        """Number of samples that each engine is generating, by engine index."""
        return [0 if slot is None else slot.outstanding for slot in self._slots]

    @property
    def num_stale_replies(self) -> int:
        """Number of completions that arrived after their engine was marked lost or their request had failed."""
        live = [slot.engine for slot in self._slots if slot is not None]
        return sum(engine.num_stale_replies for engine in (*self._replaced_engines, *live))

    def mark_lost(self, index: int, error: LostEngineError) -> None:
        """Stop using an engine: its requests are retried on others, and its later replies are dropped."""
        slot = self._slots[index]
        if slot is not None:
            slot.engine.mark_lost(error)

    def replace(self, index: int, engine: GenerationEngine) -> None:
        """Use `engine` as engine `index` from now on."""
        self.mark_lost(index, LostEngineError(f"engine {index} was replaced"))
        slot = self._slots[index]
        if slot is not None:
            self._replaced_engines.append(slot.engine)
        self._slots[index] = self._make_slot(index, engine)
        self._engine_available.set()

    async def finish_aborts(self) -> None:
        """Wait until the engines have confirmed the aborts of cancelled requests, for at most `ABORT_SECONDS`."""
        aborts = [task for slot in self._slots if slot is not None for task in slot.engine.aborts]
        if aborts:
            await asyncio.wait(aborts, timeout=ABORT_SECONDS)

    def _make_slot(self, index: int, engine: GenerationEngine) -> EngineSlot:
        outputs = PartialOutputs(
            engine, self._clock, name=f"engine {index}", no_progress_seconds=self._no_progress_seconds
        )
        return EngineSlot(BatchingEngine(engine, outputs))

    def live(self, index: int) -> EngineSlot | None:
        """Return the slot of engine `index`; None if it is lost, has not started, or makes no progress."""
        slot = self._slots[index]
        return None if slot is None or slot.engine.lost_error is not None or slot.engine.is_stalled else slot

    async def least_loaded(self, group_id: int) -> EngineSlot:
        """Return the live engine with the fewest outstanding samples; waits until at least one is live.

        Of equally loaded ones, consecutive groups take consecutive ones: the groups of other workers, too, which this
        one knows nothing of. An engine without progress is used if there is no other.
        """
        while True:
            live = [slot for slot in self._slots if slot is not None and slot.engine.lost_error is None]
            if live:
                live = [slot for slot in live if not slot.engine.is_stalled] or live
                first = (group_id + 1) % len(live)
                return min(live[first:] + live[:first], key=lambda slot: slot.outstanding)
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
        self._slot: EngineSlot | None = None
        self._lock = asyncio.Lock()
        self._of_samples: list[EngineLease] = []
        self.num_retried = 0
        """Number of the group's requests that were sent again because their engine was lost."""
        self.num_kept_tokens = 0
        """Number of tokens that these requests had sampled and continued from."""

    def count_retry(self, kept_tokens: int) -> None:
        """Count a request that is sent again, and the tokens that it continues from."""
        for counts in (self, self._pool):
            counts.num_retried += 1
            counts.num_kept_tokens += kept_tokens

    async def engine(self) -> BatchingEngine:
        """Return the group's engine; if it is lost or stalled, lease another one. Waits only if no engine is live."""
        async with self._lock:
            if self._slot is None or self._slot.engine.lost_error is not None or self._slot.engine.is_stalled:
                self._give_back()
                preferred = None if self._preferred is None else self._pool.live(self._preferred)
                self._slot = preferred or await self._pool.least_loaded(self._group_id)
                self._slot.outstanding += self._num_samples
            return self._slot.engine

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
        if self._slot is not None:
            self._slot.outstanding -= self._num_samples
        self._slot = None


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
