"""The engine of one episode, which stays usable when the process behind it is lost.

engine 0   prompt | a b c           lost; it had reported a b
engine 1   prompt + a b | c d e     continued there, or on engine 0 after its restart
"""

from __future__ import annotations

from dataclasses import replace

from megarl.errors import LostEngineError
from megarl.rollout.continuation import continue_after, join, no_tokens
from megarl.rollout.engine import Generation, GenerationRequest
from megarl.rollout.engine_pool import EngineLease
from megarl.rollout.request_clock import RequestTimeout


class ContinuingEngine:
    """A `CompletionEngine` that continues a request on another engine if its own is lost."""

    def __init__(self, lease: EngineLease, timeout: RequestTimeout) -> None:
        """Use the engine of a group's lease.

        Args:
            timeout: of the episode; it does not run while no engine is live, and starts again after a loss.
        """
        self._group, self._lease, self._timeout = lease, lease, timeout

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return one completion of the request; raises as the engine does, but never because it was lost."""
        part, request = no_tokens(), replace(request, priority=self._lease.priority)
        while True:
            engine = await self._lease.engine()
            self._timeout.restart()
            try:
                return join(part, await engine.generate(continue_after(request, part)))
            except LostEngineError as error:
                self._timeout.stop()
                engine.mark_lost(error)
                reported = engine.partial_outputs.pop(request.request_id)
                part = join(part, reported)
                self._group.count_retry(len(reported.token_ids))
                if self._lease is self._group:
                    self._lease = self._group.for_sample()

    async def abort(self, request_id: str) -> None:
        """Abort a request on the engine of the lease."""
        engine = await self._lease.engine()
        await engine.abort(request_id)
