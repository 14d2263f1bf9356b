"""Streams of fake engines that complete all requests of a call together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from megarl.rollout.engine import FinishedRequest, Generation, GenerationRequest


class WholeBatches:
    """Base class of fake engines with `generate_many`."""

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        engine: Any = self
        yield list(enumerate(await engine.generate_many(requests)))

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        return {}
