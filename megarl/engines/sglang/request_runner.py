"""Runs generation requests on SGLang: one attempt after another, until a request has its completion.

    complete --> gate --> attempt 1 ----------------------> completion
                              '-- hold: aborted ---. resume
                                                   '------> attempt 2, after the tokens of attempt 1 --> completion

All methods must run in the engine's thread, through `EngineHost.call`.

SGLang reports the tokens of an unfinished request, and with them, from here on, the version of each:

scheduler --- every 50 tokens of a request ---> tokenizer manager (the engine's host): tokens, log-probabilities
          --- from here on also ------------->  the spans of versions, which SGLang sends with the last tokens only

So the host can report unfinished requests without any call to the scheduler, and after its death.

    requests of all workers --> waiting, by (priority, arrival) --> at SGLang, at most `limit` --> completions
                                                  KV cache almost full, or requests retracted: limit falls
                                                  room in the KV cache, and requests wait: limit rises

SGLang admits requests before it knows how long they become. If its KV cache gets full, it retracts some: it discards
their keys and values, and computes them again later. A request in SGLang's own queue cannot be overtaken either, so
that the queue is kept short.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.batch.trajectory import EngineRoutes
from megarl.engines.engine import (
    UNFINISHED,
    Generation,
    GenerationRequest,
    continue_after,
    join,
    no_tokens,
    tokens_from,
)
from megarl.errors import WorkerError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import ReqState

    from megarl.engines.sglang.engine_host import EngineHost


LOOK_SECONDS = 0.5
"""Time between two looks at the load of SGLang."""

HIGH_USAGE = 0.95
"""Share of the KV cache in use from which the limit falls."""

LOW_USAGE = 0.85
"""Share of the KV cache in use below which the limit may rise."""

DECREASE = 0.85
"""Factor by which the limit falls."""

INCREASE_SHARE = 8
"""The limit rises by 1 / INCREASE_SHARE of itself at a look."""

QUEUE_SHARE = 8
"""SGLang's queue may have 1 / QUEUE_SHARE of the limit, so that SGLang need not wait for the next request."""

QUEUE_LOOKS = 10
"""Number of looks after which the requests that were in SGLang's queue at all of them are too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLoad:
    """The load of SGLang's scheduler at one time."""

    timestamp: float
    """Unix time at which the scheduler has reported it."""
    num_queued: int
    """Requests in the scheduler's queue."""
    num_retracted: int
    """Requests that were retracted lately, because the KV cache was full."""
    kv_usage: float
    """Share of the KV cache that running requests use."""
    kv_tokens: int
    """Size of the KV cache in tokens."""
    max_running: int
    """Largest number of requests that may run at a time."""


class ConcurrencyLimit:
    """The number of requests that SGLang may have: falls by a factor, rises in steps."""

    def __init__(self, load: SglangLoad, tokens_per_request: int) -> None:
        """Begin with the requests that fit into the KV cache for certain.

        Args:
            tokens_per_request: largest number of tokens, the prompt included, that a request may come to.
        """
        self._max = load.max_running + _share(load.max_running, QUEUE_SHARE)
        self.value = min(self._max, max(1, load.kv_tokens // tokens_per_request))
        self._num_queued: deque[int] = deque(maxlen=QUEUE_LOOKS)

    def update(self, load: SglangLoad, *, num_sent: int, is_waiting: bool) -> None:
        """Adapt the limit to a new load.

        Args:
            num_sent: requests that SGLang has; more than the limit until some have ended after it has fallen.
            is_waiting: whether others wait for the limit.
        """
        self._num_queued.append(load.num_queued)
        room = _share(self.value, QUEUE_SHARE)
        surplus = min(self._num_queued) - room if len(self._num_queued) == QUEUE_LOOKS else 0
        if load.num_retracted or load.kv_usage >= HIGH_USAGE:
            if num_sent <= self.value:
                self.value = max(1, int(DECREASE * num_sent))
        elif surplus > 0:
            self.value = max(1, min(self.value, num_sent - surplus))
        elif is_waiting and load.num_queued <= room and load.kv_usage < LOW_USAGE:
            self.value = min(self._max, self.value + _share(self.value, INCREASE_SHARE))


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of a request at the gate."""

    priority: int
    max_tokens: int
    """Largest number of tokens, the prompt included, that the request may come to."""
    number: int
    """Order of arrival."""
    is_admitted: bool = False
    """Whether it counts against the limit."""
    is_withdrawn: bool = False
    turn: asyncio.Future[None] | None = None
    """Resolved when it need not wait longer; None if it does not wait."""


class RequestGate:
    """The requests of one engine that wait for SGLang, and the number of those that it has."""

    def __init__(self, read_load: Callable[[], SglangLoad | None]) -> None:
        """`read_load`: returns the latest load of SGLang; None if it is not known yet, and requests do not wait."""
        self._read_load = read_load
        self._limit: ConcurrencyLimit | None = None
        self._last_load = 0.0
        """Timestamp of the load that the limit was last adapted to."""
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, int, int, Ticket]] = []
        """A heap: admitted requests, which were held for an update, then by falling priority, then by arrival."""
        self._num_tickets = self.num_admitted = self.num_waiting = 0
        self._is_open = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int | None:
        """Number of requests that SGLang may have at a time; None before the first one."""
        return None if self._limit is None else self._limit.value

    def register(self, priority: int, max_tokens: int) -> Ticket:
        """Return the place of a new request, which `leave` gives back."""
        self._num_tickets += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        return Ticket(priority, max_tokens, next(self._numbers))

    async def wait_turn(self, ticket: Ticket) -> bool:
        """Wait until the request may be sent to SGLang; return False if it is withdrawn.

        A request that has been sent keeps its place, so that it waits for nothing but an open gate.
        """
        while (ticket.is_admitted or not ticket.is_withdrawn) and not self._admit(ticket):
            ticket.turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (not ticket.is_admitted, -ticket.priority, ticket.number, ticket))
            self.num_waiting += 1
            try:
                await ticket.turn
            finally:
                self.num_waiting -= 1
                ticket.turn = None
        return not ticket.is_withdrawn

    def withdraw(self, ticket: Ticket) -> None:
        """End the request's wait for the limit; one that SGLang has had ends once the gate is open."""
        ticket.is_withdrawn = True
        if not ticket.is_admitted and ticket.turn is not None and not ticket.turn.done():
            ticket.turn.set_result(None)

    def leave(self, ticket: Ticket) -> None:
        """Give the request's place to the next one."""
        self._num_tickets -= 1
        self.num_admitted -= ticket.is_admitted
        self._admit_next()

    def close(self) -> None:
        """Let all requests wait until `open`; those that SGLang has keep their places."""
        self._is_open = False

    def open(self) -> None:
        """Let requests pass as far as the limit allows."""
        self._is_open = True
        self._admit_next()

    def _admit(self, ticket: Ticket) -> bool:
        """Whether the request may be sent; it then counts against the limit."""
        if not self._is_open:
            return False
        if not ticket.is_admitted:
            if self._limit is None and (load := self._read_load()) is not None:
                self._limit = ConcurrencyLimit(load, ticket.max_tokens)
            if self._limit is not None and self.num_admitted >= self._limit.value:
                return False
            ticket.is_admitted = True
            self.num_admitted += 1
        return True

    def _admit_next(self) -> None:
        while self._waiting:
            *_, ticket = self._waiting[0]
            if ticket.turn is not None and not ticket.turn.done():
                if not self._admit(ticket):
                    return
                ticket.turn.set_result(None)
            heapq.heappop(self._waiting)

    def _look(self) -> None:
        """Adapt the limit to the load, and look again later if there are requests."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_SECONDS, self._look) if self._num_tickets else None
        load = self._read_load()
        if self._limit is None or load is None or load.timestamp == self._last_load:
            return
        self._last_load = load.timestamp
        self._limit.update(load, num_sent=self.num_admitted, is_waiting=self.num_waiting > 0)
        self._admit_next()


def _share(number: int, share: int) -> int:
    return max(1, number // share)


SPANS = "megarl_policy_version_spans"
"""Name of the spans in SGLang's custom information of a request."""

Span = tuple[int, int, int]
"""A policy version, and the first and last + 1 index of tokens that it has sampled."""


def send_versions_with_partial_outputs() -> None:
    """Have SGLang send the spans of versions with the tokens of unfinished requests; for scheduler processes."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    class OutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[Span]]]:
            """Return the spans of all tokens sent so far, for each request; nothing if all have finished."""
            if all(req.finished() for req in reqs):
                return {}
            version = get_serving().weight_version
            return {SPANS: [[] if req.finished() else _spans_of(req, version) for req in reqs]}

    def _spans_of(req: Req, version: str) -> list[Span]:
        spans = compute_weight_version_spans(
            req.weight_version_events, current_version=version, num_output_tokens=req.send_token_offset
        )
        return [(int(span.version), span.start, span.end) for span in spans]

    Scheduler.get_output_streamer_class = lambda _: OutputStreamer


def count_partial_tokens(state: ReqState | None) -> int:
    """Return the number of tokens that `read_partial_output` returns."""
    spans: list[Span] = [] if state is None else state.customized_info_accumulated.get(SPANS, [])
    return spans[-1][2] if spans else 0


def read_partial_output(state: ReqState | None) -> Generation:
    """Return the tokens of an unfinished request that have reached the tokenizer manager.

    Args:
        state: of the request; None if SGLang does not have it.
    """
    spans: list[Span] = [] if state is None else state.customized_info_accumulated.get(SPANS, [])
    num = count_partial_tokens(state)
    sampled: list[Any] = state.output_token_logprobs[:num] if state is not None else []
    versions = np.full(num, -1, np.int32)
    for version, start, end in spans:  # each message repeats those before it
        versions[start:end] = version
    assert len(sampled) == num, f"{len(sampled)} tokens, versions of {num}"
    return Generation(
        token_ids=np.array([token for _, token, *_ in sampled], np.int32),
        logprobs=np.array([logprob for logprob, *_ in sampled], np.float32),
        policy_versions=versions,
        finish_reason=UNFINISHED,
    )


ABORT_SECONDS = 0.5
"""Time after which a request that was aborted and still runs is aborted again: SGLang may not have known it yet."""

MIN_REPORT_SECONDS = 1.0
"""Time between two reports from which requests that wait are reported as waiting."""

EARLY_ABORT_SECONDS = 5.0
"""How long an abort whose request is unknown waits for it, and how long an id is known to have ended."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request, and what the attempts before the current one have sampled."""

    request: GenerationRequest
    ticket: Ticket
    reported_at: float = -inf
    """Time of the last report with this request."""
    num_sampled: int | None = None
    """Number of tokens that the engine had sampled in all at that time; None: before the first report."""
    sglang_id: str = ""
    """Id under which SGLang knows the current attempt."""
    part: Generation = field(default_factory=no_tokens)
    is_aborted: bool = False
    """Whether its caller has aborted it."""


class RequestRunner:
    """The requests in flight of one engine."""

    def __init__(self, host: EngineHost, stop_token_ids: Sequence[int], routes: EngineRoutes | None = None) -> None:
        self._host, self._stop_token_ids, self._routes = host, list(stop_token_ids), routes
        self._in_flight: dict[str, _Attempt] = {}
        """By request id."""
        self.num_attempts = 0
        """Requests that SGLang has received."""
        self._running: set[_Attempt] = set()
        """Requests that SGLang has not answered."""
        self._idle = asyncio.Event()
        """Set by the last request of `_running`."""
        self.gate = RequestGate(self._read_load)
        """Where requests wait before they are sent to SGLang."""
        self._early_aborts: dict[str, float] = {}
        """By id of requests that were aborted and have not arrived, the time of the abort, ascending."""
        self._ended: dict[str, float] = {}
        """By id of requests that have ended, the time, ascending: an abort may arrive after its request has ended."""
        self._num_sampled = 0
        """Number of tokens that the requests which have ended have sampled."""
        self._is_held = False
        """Whether requests that SGLang aborts continue later."""
        self.first_completion: float | None = None
        """Unix time when the first completion was finished; None before that."""

    async def complete_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one completion per request, in order, once all are done; raises as `complete`."""
        if len(requests) == 1:
            return [await self.complete(requests[0])]
        tasks = [asyncio.ensure_future(self.complete(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def complete(self, request: GenerationRequest) -> Generation:
        """Return the completion of a request.

        Raises:
            WorkerError: SGLang rejected the request, or a newer request has the same id.
        """
        request_id = request.request_id
        self._abort_attempt(request_id)  # its caller has died or timed out
        ticket = self.gate.register(request.priority, len(request.token_ids) + request.sampling.max_new_tokens)
        attempt = self._in_flight[request_id] = _Attempt(request, ticket)
        if time.monotonic() - self._early_aborts.pop(request_id, -inf) < EARLY_ABORT_SECONDS:
            self._abort_attempt(request_id)
        try:
            while await self.gate.wait_turn(ticket):
                generation = await self._run(attempt)
                attempt.part = join(attempt.part, generation)
                if generation.finish_reason != "abort" or not self._is_held or attempt.is_aborted:
                    break
            else:
                attempt.part = replace(attempt.part, finish_reason="abort")
        finally:
            self.gate.leave(ticket)
            self._num_sampled += len(attempt.part.token_ids)
            is_latest = self._in_flight.get(request_id) is attempt
            if is_latest:
                del self._in_flight[request_id]
                _remember(self._ended, request_id)
        if not is_latest:
            raise WorkerError(f"request {request_id} was replaced by a newer request with the same id")
        if self.first_completion is None:
            self.first_completion = time.time()
        return attempt.part

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        """Return the tokens of requests in flight after those that are known; see `GenerationEngine`.

        A request without others has an entry without tokens if the engine has sampled any since the last report, which
        was at least `MIN_REPORT_SECONDS` ago.
        """
        states = self._host.tokenizer_manager.rid_to_state
        num_sampled = {
            request_id: len(attempt.part.token_ids) + count_partial_tokens(states.get(attempt.sglang_id))
            for request_id, attempt in self._in_flight.items()
        }
        total = self._num_sampled + sum(num_sampled.values())
        parts: dict[str, Generation] = {}
        for request_id in known.keys() & num_sampled.keys():
            attempt = self._in_flight[request_id]
            if num_sampled[request_id] > known[request_id]:
                part = join(attempt.part, read_partial_output(states.get(attempt.sglang_id)))
                parts[request_id] = tokens_from(part, known[request_id])
            if time.monotonic() - attempt.reported_at < MIN_REPORT_SECONDS:
                continue
            if attempt.num_sampled is not None and total > attempt.num_sampled:
                parts.setdefault(request_id, no_tokens())
            attempt.reported_at, attempt.num_sampled = time.monotonic(), total
        return parts

    async def abort(self, request_id: str) -> None:
        """End a request early, also if it arrives after this call. Ids that are never seen are ignored."""
        await asyncio.sleep(0)  # a batch that has just arrived has not begun its requests
        if request_id in self._in_flight:
            self._abort_attempt(request_id)
        elif request_id not in self._ended:
            _remember(self._early_aborts, request_id)

    async def abort_all(self) -> None:
        """End all requests in flight early."""
        for request_id in self._in_flight:
            self._abort_attempt(request_id)

    async def abort_groups(self, request_ids: Sequence[str]) -> None:
        """End early all requests of these groups, whose ids begin with that of the group and a `-`."""
        prefixes = tuple(f"{request_id}-" for request_id in request_ids)
        for request_id in self._in_flight:
            if request_id.startswith(prefixes):
                self._abort_attempt(request_id)

    def keep_waiting(self) -> None:
        """Send no further requests to SGLang until `resume`: one that is aborted before has no attempt to abort."""
        self.gate.close()

    async def hold(self) -> None:
        """Abort what runs, and return once nothing does; requests wait for `resume`, and keep their tokens."""
        self.keep_waiting()
        self._is_held = True
        while self._running:
            self._idle.clear()
            self._host.tokenizer_manager.abort_request(abort_all=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), ABORT_SECONDS)

    def resume(self) -> None:
        """Continue the requests that wait."""
        self._is_held = False
        self.gate.open()

    def _abort_attempt(self, request_id: str) -> None:
        attempt = self._in_flight.get(request_id)
        if attempt is not None:
            attempt.is_aborted = True
            self.gate.withdraw(attempt.ticket)
            self._send_abort(attempt)

    def _send_abort(self, attempt: _Attempt) -> None:
        """Abort the request in SGLang until it has ended."""
        if attempt in self._running:
            manager = self._host.tokenizer_manager
            if (state := manager.rid_to_state.get(attempt.sglang_id)) is not None:
                state.abort_sent = False  # otherwise SGLang ignores a second abort
            manager.abort_request(rid=attempt.sglang_id)
            asyncio.get_running_loop().call_later(ABORT_SECONDS, self._send_abort, attempt)

    def _read_load(self) -> SglangLoad | None:
        """Return the load that SGLang's schedulers publish in shared memory; None if none has published it yet.

        With data-parallel attention, each group of ranks has a scheduler with a KV cache of its own.
        """
        loads = self._host.tokenizer_manager.load_snapshot_reader.read_all()
        loads = [load for load in loads if load.max_running_requests]
        if not loads:
            return None
        return SglangLoad(
            timestamp=max(load.timestamp for load in loads),
            num_queued=sum(load.num_waiting_reqs for load in loads),
            num_retracted=sum(0 if load.queues is None else load.queues.retracted for load in loads),
            kv_usage=max(load.token_usage for load in loads),
            kv_tokens=sum(load.max_total_num_tokens for load in loads),
            max_running=sum(load.max_running_requests for load in loads),
        )

    async def _run(self, attempt: _Attempt) -> Generation:
        """Return what SGLang samples after the tokens of earlier attempts."""
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = continue_after(attempt.request, attempt.part)
        sampling = request.sampling
        # SGLang's default is one fixed seed, under which all samples of a prompt would be the same
        seed = secrets.randbelow(2**31) if sampling.seed is None else sampling.seed
        self.num_attempts += 1
        # SGLang rejects duplicates, and aborts all requests whose id has a given prefix: the "." keeps an id from being
        # a prefix of another
        attempt.sglang_id = f"{request.request_id}#{self.num_attempts}."
        work = GenerateReqInput(
            rid=attempt.sglang_id,
            input_ids=list(request.token_ids),
            sampling_params={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": sampling.max_new_tokens,
                "sampling_seed": seed,
                "stop_token_ids": self._stop_token_ids,
            },
            return_logprob=True,
            return_routed_experts=self._routes is not None,
            routed_experts_start_len=request.num_routed,
        )
        self._running.add(attempt)
        try:
            answer = await anext(self._host.tokenizer_manager.generate_request(work, None))
        except (ValueError, HTTPException) as e:  # SGLang raises HTTPException when it is overloaded
            raise WorkerError(f"request {request.request_id}: {e}") from e
        finally:
            self._running.discard(attempt)
            if not self._running:
                self._idle.set()
        return _read_generation(answer, self._routes)


def _remember(times: dict[str, float], request_id: str) -> None:
    """Note the time of an id, and forget those of `EARLY_ABORT_SECONDS` ago."""
    now = time.monotonic()
    times.pop(request_id, None)
    times[request_id] = now
    for oldest in list(itertools.takewhile(lambda each: times[each] < now - EARLY_ABORT_SECONDS, times)):
        del times[oldest]


def _read_generation(answer: Mapping[str, Any], routes: EngineRoutes | None) -> Generation:
    meta = answer["meta_info"]
    encoded = meta.get("routed_experts")
    sampled = meta.get("output_token_logprobs") or []
    versions = np.full(len(sampled), int(meta["weight_version"]), np.int32)
    for span in meta.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = int(span["version"])
    return Generation(
        token_ids=np.array([token for _, token, *_ in sampled], np.int32),
        logprobs=np.array([logprob for logprob, *_ in sampled], np.float32),
        policy_versions=versions,
        finish_reason=meta["finish_reason"]["type"],
        routes=None if routes is None or encoded is None else routes.decode(encoded),
    )
