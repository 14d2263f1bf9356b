"""Keeps what the unfinished requests of an engine have sampled, so that it survives the loss of the engine.

The engine is asked every few seconds, in one call for all requests that this process has sent to it. Requests that
finish before that cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from megarl.errors import MegarlError
from megarl.rollout.continuation import join, no_tokens
from megarl.rollout.engine import Generation, GenerationEngine

REPORT_SECONDS = 5.0
"""Time between two reports of an engine, and age from which requests are in them; what was sampled after the last one
is lost with the engine."""


@dataclass(slots=True)
class _Part:
    """What is known of a request in flight."""

    sent_at: float
    """Time of the event loop."""
    generation: Generation = field(default_factory=no_tokens)


class PartialOutputs:
    """The tokens of one engine's unfinished requests, as of its last report."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._parts: dict[str, _Part] = {}
        """By id of the requests in flight."""
        self._task: asyncio.Task[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens reported of all requests in flight."""
        return sum(len(part.generation.token_ids) for part in self._parts.values())

    def add(self, request_id: str) -> None:
        """Have the tokens of a request reported until it is popped."""
        loop = asyncio.get_running_loop()
        self._parts[request_id] = _Part(loop.time())
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._collect())

    def pop(self, request_id: str) -> Generation:
        """Return the request's tokens as of the last report, and forget it."""
        part = self._parts.pop(request_id, None)
        return no_tokens() if part is None else part.generation

    async def _collect(self) -> None:
        """Ask for reports until no request is in flight."""
        loop = asyncio.get_running_loop()
        while self._parts:
            await asyncio.sleep(REPORT_SECONDS)
            sent_before = loop.time() - REPORT_SECONDS
            asked = {request_id: part for request_id, part in self._parts.items() if part.sent_at <= sent_before}
            if not asked:
                continue
            known = {request_id: len(part.generation.token_ids) for request_id, part in asked.items()}
            with contextlib.suppress(MegarlError):  # the requests fail with the same error, if it lasts
                for request_id, new in (await self._engine.partial_outputs(known)).items():
                    asked[request_id].generation = join(asked[request_id].generation, new)
