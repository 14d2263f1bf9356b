"""Engines in other processes, as rollout workers and trainer ranks see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from megarl.errors import MegarlError, WeightSyncError
from megarl.reshard.bucket import WeightBucket
from megarl.rollout.engine import Generation, GenerationRequest
from megarl.workers.failure import translate, wait_all


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """A `GenerationEngine` in a Ray actor (an AsyncShell)."""

    handle: Any
    name: str

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `GenerationEngine`."""
        (generation,) = await self.generate_many([request])
        return generation

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """See `GenerationEngine`."""
        generations: list[Generation] = await self._invoke("generate_many", requests)
        return generations

    async def abort(self, request_id: str) -> None:
        """See `GenerationEngine`."""
        await self._invoke("abort", request_id)

    async def _invoke(self, method: str, argument: Any) -> Any:
        try:
            return await asyncio.wrap_future(self.handle.invoke.remote(method, argument).future())
        except RayError as error:
            raise translate(error, what=method, name=self.name) from error


@dataclass(frozen=True, slots=True)
class EngineSink:
    """A `WeightSink` that hands buckets to an engine on the same machine."""

    handle: Any
    name: str
    timeout_seconds: float

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """See `WeightSink`."""
        ref = self.handle.invoke.remote("load_weights", bucket)

        def wait() -> None:
            try:
                wait_all([ref], what="load_weights", names={ref: self.name}, timeout=self.timeout_seconds)
            except WeightSyncError:
                raise
            except MegarlError as error:
                raise WeightSyncError(f"{self.name} did not take a bucket of weights: {error}") from error

        return wait
