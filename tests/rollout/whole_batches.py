"""Streams of fake engines that complete all requests of a call together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from megarl.rollout.engine import FinishedRequest, GenerationRequest


class WholeBatches:
    """Base class of fake engines with `generate_many`."""

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        engine: Any = self
        yield list(enumerate(await engine.generate_many(requests)))
