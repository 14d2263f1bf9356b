"""The rollout engines of a run: one process each, and the weights they are given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import RunConfig
from megarl.controller.remote import EngineSink, RemoteEngine
from megarl.placement.pool import SlotPool
from megarl.rollout.environment import engine_environment
from megarl.rollout.sglang import SglangEngine
from megarl.rollout.spec import EngineSpec, engine_spec
from megarl.workers.failure import wait_all
from megarl.workers.shell import AsyncShell

SHUTDOWN_SECONDS = 5.0
"""How long engines may take to end in order, before Ray ends their processes."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine's process."""

    handle: Any
    name: str


class EngineGroup:
    """Engine i runs on slots `i * tp` up to `(i + 1) * tp` of the pool."""

    def __init__(self, config: RunConfig, pool: SlotPool) -> None:
        self._timeout = config.weight_sync.timeout_seconds
        tp, device = config.rollout.tp, pool.device
        environment = engine_environment(device, tp)
        if device == "cuda":
            # The slot's GPU is granted to its trainer rank; the engine finds it by number.
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        actor = ray.remote(AsyncShell)
        self.engines: list[StartedEngine] = []
        self._starting: dict[Any, str] = {}
        for replica in range(config.rollout.replicas):
            slot, name = pool.slots[replica * tp], f"engine {replica}"
            handle = actor.options(
                num_cpus=0,
                max_restarts=0,
                max_concurrency=10_000,  # every request in flight is a call
                scheduling_strategy=PlacementGroupSchedulingStrategy(pool.group, slot.bundle),
                runtime_env={"env_vars": environment},
            ).remote(environment)
            spec = replace(engine_spec(config, replica, device), base_gpu_id=slot.gpu_id or 0)
            self._starting[handle.build.remote(_start_engine, (spec,), environment)] = name
            self.engines.append(StartedEngine(handle, name))
        self._start_timeout = config.rollout.engine.start_timeout_seconds

    def wait_started(self) -> None:
        """Block until every engine answers.

        Raises:
            WorkerError: one did not come up.
        """
        wait_all(list(self._starting), what="engine start", names=self._starting, timeout=self._start_timeout)

    def remote_engines(self) -> list[RemoteEngine]:
        """For rollout workers."""
        return [RemoteEngine(engine.handle, engine.name) for engine in self.engines]

    def sinks(self) -> tuple[EngineSink, ...]:
        """For the trainer rank that sends."""
        return tuple(EngineSink(engine.handle, engine.name, self._timeout) for engine in self.engines)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The same call on every engine; raises as `wait_all` does."""
        refs = [engine.handle.invoke.remote(method, *arguments) for engine in self.engines]
        names = {ref: engine.name for ref, engine in zip(refs, self.engines, strict=True)}
        return wait_all(refs, what=method, names=names, timeout=self._timeout)

    def shutdown(self) -> None:
        """End the engines' processes in order, also while they start; one that is gone already is no error."""
        refs = [engine.handle.stop.remote() for engine in self.engines]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS)


async def _start_engine(spec: EngineSpec) -> SglangEngine:
    engine = SglangEngine(spec)
    try:
        await engine.start()
    except BaseException:
        await engine.shutdown()
        raise
    return engine
