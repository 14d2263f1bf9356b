"""Proxies of engines in other processes, for rollout workers and trainer ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError

from megarl.cluster.process.process_start import record_imports
from megarl.cluster.workers.failures import to_megarl_error, wait_all
from megarl.engines.engine import FinishedRequest, Generation, GenerationRequest
from megarl.engines.engine_spec import EngineSpec
from megarl.errors import LostEngineError, MegarlError, WeightSyncError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megarl.engines.sglang.engine_host import EngineHost
    from megarl.reshard.transfer.bucket import WeightBucket


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """An `EngineNode` whose EngineHost runs in a Ray actor (an AsyncWorkerHost)."""

    handle: ActorHandle
    spec: EngineSpec
    """Spec of the engine on this node, without `dist_init_addr`."""
    environment: Mapping[str, str]
    """Environment variables of the actor."""

    @property
    def name(self) -> str:
        """Name of the node in messages."""
        return self.spec.node_name

    async def start(self, dist_init_addr: str) -> None:
        """Start the schedulers of the node; raises as `EngineHost.start` does."""
        spec = replace(self.spec, dist_init_addr=dist_init_addr)
        await self._wait("start", self.handle.build.remote(_start_host, (spec,), self.environment, time.time()))

    async def ask(
        self, method: Callable[Concatenate[EngineHost, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of a method of the node's EngineHost.

        Raises:
            LostEngineError: the actor has died.
        """
        assert not kwargs, "AsyncWorkerHost.invoke takes positional arguments only"
        result: T = await self._wait(method.__name__, self.handle.invoke.remote(method.__name__, *args))
        return result

    async def shutdown(self) -> None:
        """Stop the node's processes, even while they start."""
        await self._wait("stop", self.handle.stop.remote())

    async def _wait(self, what: str, ref: ObjectRef) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except RayError as error:
            cause = to_megarl_error(error, what=what, name=f"the engine's host on {self.name}")
            raise LostEngineError(str(cause)) if isinstance(error, RayActorError) else cause from error


async def _start_host(spec: EngineSpec) -> EngineHost:
    with record_imports():
        from megarl.engines.sglang.engine_host import EngineHost

    host = EngineHost(spec)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(host.shutdown)
        await host.start()
        closing.pop_all()
    return host


RETRY_SECONDS = 1.0
"""Delay before a call whose answer was lost is retried."""


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """A `GenerationEngine` in a Ray actor (an AsyncWorkerHost)."""

    handle: ActorHandle
    name: str

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        """Yield the completions as they finish, one remote call for each list of them.

        Requests whose completions were lost on the way are sent again, as a new batch.
        """
        left = dict(enumerate(requests))
        while left:
            batch_id, indices = uuid4().hex, list(left)
            call = self._call("begin_requests", batch_id, list(left.values()))
            try:
                while left:
                    finished = [(indices[i], outcome) for i, outcome in await call]
                    for index, _ in finished:
                        del left[index]
                    yield finished
                    if left:
                        call = self._call("finished_requests", batch_id)
            except (ActorUnavailableError, ObjectLostError):
                await asyncio.sleep(RETRY_SECONDS)  # by then Ray may have noticed that the engine has died

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        """Return the tokens that requests in flight have sampled so far, without those that are known."""
        parts: dict[str, Generation] = await self._invoke("partial_outputs", known)
        return parts

    async def abort(self, request_id: str) -> None:
        """End the request early, with finish_reason `abort`."""
        await self._invoke("abort", request_id)

    async def _invoke(self, method: str, argument: object) -> Any:
        """Call the engine; retry if the answer is lost, because the engine drops running requests with the same ids."""
        while True:
            try:
                return await self._call(method, argument)
            except (ActorUnavailableError, ObjectLostError):
                await asyncio.sleep(RETRY_SECONDS)  # by then Ray may have noticed that the engine has died

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call the engine once; raises Ray's error if the answer is lost, a `MegarlError` if the call has failed."""
        try:
            return await asyncio.wrap_future(self.handle.invoke.remote(method, *arguments).future())
        except (ActorUnavailableError, ObjectLostError):
            raise
        except RayError as error:
            cause = to_megarl_error(error, what=method, name=self.name)
            # an engine that reports its own end raises LostEngineError already
            raise LostEngineError(str(cause)) if isinstance(error, RayActorError) else cause from error


@dataclass(frozen=True, slots=True)
class EngineSink:
    """A `WeightSink` that sends buckets to an engine on the same node."""

    handle: ActorHandle
    name: str
    timeout_seconds: float

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Begin to load the bucket; return a function that blocks until it is loaded."""
        ref = self.handle.invoke.remote("load_weights", bucket)
        return lambda: _wait_loaded(ref, "load_weights", self.name, self.timeout_seconds)


def _wait_loaded(ref: ObjectRef, what: str, name: str, timeout_seconds: float) -> None:
    try:
        wait_all([ref], what=what, names={ref: name}, timeout=timeout_seconds)
    except WeightSyncError as error:
        raise WeightSyncError(f"{name}: {error}") from error
    except MegarlError as error:
        raise WeightSyncError(f"{name} did not load a bucket of weights: {error}") from error
