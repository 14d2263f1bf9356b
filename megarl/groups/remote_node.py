"""The other nodes of an engine that spans several, as its first node reaches them: one Ray actor each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import RayActorError, RayError

from megarl.errors import LostEngineError
from megarl.process.startup_trace import record_imports
from megarl.rollout.engine_spec import EngineSpec
from megarl.workers.failures import to_megarl_error

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megarl.rollout.sglang.engine_host import EngineHost

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
        from megarl.rollout.sglang.engine_host import EngineHost

    host = EngineHost(spec)
    try:
        await host.start()
    except BaseException:
        await host.shutdown()
        raise
    return host
