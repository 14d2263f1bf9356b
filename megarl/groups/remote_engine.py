"""Engines in other processes, as rollout workers and trainer ranks see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError

from megarl.errors import LostEngineError, MegarlError, WeightSyncError
from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket
from megarl.rollout.engine import Generation, GenerationRequest
from megarl.workers.failures import translate, wait_all

AGAIN_SECONDS = 1.0
"""Before a call is made again whose answer did not arrive."""


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
        """As often as the answer is lost on its way: the engine drops what it is at under the same request ids."""
        while True:
            try:
                return await asyncio.wrap_future(self.handle.invoke.remote(method, argument).future())
            except (ActorUnavailableError, ObjectLostError):
                await asyncio.sleep(AGAIN_SECONDS)  # Ray soon knows whether the engine has died
            except RayError as error:
                cause = translate(error, what=method, name=self.name)
                # an engine's own words for its end are of this class already
                raise LostEngineError(str(cause)) if isinstance(error, RayActorError) else cause from error


@dataclass(frozen=True, slots=True)
class EngineRankSink:
    """A `BoxSink`: one tensor rank of an engine on the same machine."""

    handle: Any
    name: str
    tp_rank: int
    timeout_seconds: float

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """See `BoxSink`."""
        ref = self.handle.invoke.remote("load_boxes", self.tp_rank, index, bucket)
        name = f"{self.name} rank {self.tp_rank}"
        return lambda: _taken(ref, "load_boxes", name, self.timeout_seconds)


@dataclass(frozen=True, slots=True)
class EngineSink:
    """A `WeightSink` that hands buckets to an engine on the same machine."""

    handle: Any
    name: str
    timeout_seconds: float

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """See `WeightSink`."""
        ref = self.handle.invoke.remote("load_weights", bucket)
        return lambda: _taken(ref, "load_weights", self.name, self.timeout_seconds)


def _taken(ref: Any, what: str, name: str, timeout_seconds: float) -> None:
    try:
        wait_all([ref], what=what, names={ref: name}, timeout=timeout_seconds)
    except WeightSyncError as error:
        raise WeightSyncError(f"{name}: {error}") from error
    except MegarlError as error:
        raise WeightSyncError(f"{name} did not take a bucket of weights: {error}") from error
