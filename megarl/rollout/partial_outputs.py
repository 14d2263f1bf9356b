"""The unfinished requests of one engine: what they have sampled, and whether the engine makes progress.

The engine is asked every few seconds, in one call for all requests that this process has sent to it. Requests that
finish before that cost nothing. What the engine has reported survives its loss.

An engine makes progress if it completes a request, reports new tokens, or reports that a request waits while it samples
others. One that owes completions and shows no such sign for `no_progress_seconds` fails the requests that have waited
for so long.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field, replace
from math import inf

from megarl.errors import MegarlError, StalledEngineError
from megarl.rollout.continuation import join, no_tokens
from megarl.rollout.engine import Generation, GenerationEngine
from megarl.rollout.request_clock import ClockTimer, RequestClock, TimeLimit

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
