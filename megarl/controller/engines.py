"""The rollout engines of a run: one process each, and the weights they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import RunConfig
from megarl.controller.remote import EngineRankSink, EngineSink, RemoteEngine
from megarl.errors import ConfigError
from megarl.placement.pool import SlotPool
from megarl.reshard.layout import WeightLayout
from megarl.rollout.environment import engine_environment
from megarl.rollout.sglang import SglangEngine
from megarl.rollout.spec import EngineSpec, engine_spec
from megarl.workers.failure import wait_all
from megarl.workers.shell import AsyncShell

SHUTDOWN_SECONDS = 3.0
"""How long engines may take to end in order, before Ray ends their processes."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine's process."""

    handle: Any
    name: str


class EngineGroup:
    """Rank r of engine i runs on slot `servers[i][r]` of the pool, beside the trainer rank that serves it."""

    def __init__(self, config: RunConfig, pool: SlotPool, servers: Sequence[Sequence[int]]) -> None:
        self.servers = servers
        self._timeout = config.weight_sync.timeout_seconds
        tp, device = config.rollout.tp, pool.device
        environment = engine_environment(device, tp)
        if device == "cuda":
            # The slot's GPU is granted to its trainer rank; the engine finds it by number.
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        actor = ray.remote(AsyncShell)
        self.engines: list[StartedEngine] = []
        self._starting: dict[Any, str] = {}
        for replica, ranks in enumerate(servers):
            slots, name = [pool.slots[rank] for rank in ranks], f"engine {replica}"
            handle = actor.options(
                num_cpus=0,
                max_restarts=0,
                max_concurrency=10_000,  # every request in flight is a call
                scheduling_strategy=PlacementGroupSchedulingStrategy(pool.group, slots[0].bundle),
                runtime_env={"env_vars": environment},
            ).remote(environment)
            spec = _on_gpus(engine_spec(config, replica, device), [slot.gpu_id for slot in slots], name)
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

    def layouts(self) -> list[WeightLayout]:
        """By tensor rank, what an engine needs; replicas are alike."""
        first: list[WeightLayout] = self.call("layouts")[0]
        return first

    def rank_sink(self, replica: int, tp_rank: int) -> EngineRankSink:
        """For the trainer rank that serves this rank."""
        engine = self.engines[replica]
        return EngineRankSink(engine.handle, engine.name, tp_rank, self._timeout)

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


def _on_gpus(spec: EngineSpec, gpu_ids: Sequence[int | None], name: str) -> EngineSpec:
    """The spec for an engine whose ranks run on these GPUs, which SGLang numbers with a constant step."""
    ids = [gpu_id for gpu_id in gpu_ids if gpu_id is not None]
    if not ids:
        return spec
    step = ids[1] - ids[0] if len(ids) > 1 else 1
    if ids != [ids[0] + i * step for i in range(spec.tp)]:
        raise ConfigError(f"{name}: SGLang needs its GPUs in equal steps, got {ids}")
    return replace(spec, base_gpu_id=ids[0], extra_args={**spec.extra_args, "gpu_id_step": step})


async def _start_engine(spec: EngineSpec) -> SglangEngine:
    engine = SglangEngine(spec)
    try:
        await engine.start()
    except BaseException:
        await engine.shutdown()
        raise
    return engine
