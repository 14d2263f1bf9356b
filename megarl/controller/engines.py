"""The rollout engines of a run: one process each, and the weights they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import RunConfig
from megarl.controller.remote import EngineRankSink, EngineSink, RemoteEngine
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
            # The slots' GPUs are granted to their trainer ranks; Ray would hide them from the engine.
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        actor = ray.remote(AsyncShell)
        self.engines: list[StartedEngine] = []
        self._starting: dict[Any, str] = {}
        for replica, ranks in enumerate(servers):
            slots, name = [pool.slots[rank] for rank in ranks], f"engine {replica}"
            of_engine = environment | gpu_environment([slot.gpu_id for slot in slots])
            handle = actor.options(
                num_cpus=0,
                max_restarts=0,
                max_concurrency=10_000,  # every request in flight is a call
                scheduling_strategy=PlacementGroupSchedulingStrategy(pool.group, slots[0].bundle),
                runtime_env={"env_vars": of_engine},
            ).remote(of_engine)
            spec = engine_spec(config, replica, device)
            self._starting[handle.build.remote(_start_engine, (spec,), of_engine)] = name
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

    def whole_tensors(self) -> tuple[str, ...]:
        """Tensors that every engine takes through its sink of `sinks`, also where all others go to `rank_sink`s."""
        first: tuple[str, ...] = self.call("whole_tensors")[0]
        return first

    def rank_sink(self, replica: int, tp_rank: int) -> EngineRankSink:
        """For the trainer rank that serves this rank."""
        engine = self.engines[replica]
        return EngineRankSink(engine.handle, engine.name, tp_rank, self._timeout)

    def sinks(self) -> tuple[EngineSink, ...]:
        """By engine, for the trainer rank that sends whole tensors to it."""
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


def gpu_environment(gpu_ids: Sequence[int | None]) -> dict[str, str]:
    """The variable by which an engine sees just its GPUs, in the order of its ranks; nothing without GPUs."""
    ids = [str(gpu_id) for gpu_id in gpu_ids if gpu_id is not None]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}


async def _start_engine(spec: EngineSpec) -> SglangEngine:
    engine = SglangEngine(spec)
    try:
        await engine.start()
    except BaseException:
        await engine.shutdown()
        raise
    return engine
