"""The rollout engines of a run: one process each, and the weights they are given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import RunConfig
from megarl.errors import WorkerError
from megarl.groups.remote_engine import EngineRankSink, EngineSink, RemoteEngine
from megarl.placement.nodes import cluster_nodes
from megarl.placement.pool import SlotPool
from megarl.process.startup_trace import ProcessStart
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.planning.disaggregated import Handover
from megarl.rollout.engine_spec import EngineSpec, engine_spec
from megarl.rollout.sglang.engine_environment import engine_environment
from megarl.rollout.sglang.sglang_engine import SglangEngine
from megarl.supervision.engine_supervisor import Supervision
from megarl.supervision.restart_budget import Restarts
from megarl.workers.failures import wait_all
from megarl.workers.group import RemoteCall
from megarl.workers.worker_host import AsyncShell

SHUTDOWN_SECONDS = 3.0
"""How long engines may take to end in order, before Ray ends their processes."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine's process."""

    handle: Any
    name: str


class Engines:
    """Some engines, or all, called as one; engine i of them has the slots `servers[i]` of the pool."""

    def __init__(
        self, engines: Sequence[StartedEngine], servers: Sequence[Sequence[int]], pool: SlotPool, timeout: float
    ) -> None:
        self.engines, self.servers, self.pool, self._timeout = list(engines), servers, pool, timeout

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
        return self.begin(method, *arguments).result(self._timeout)

    def begin(self, method: str, *arguments: Any) -> RemoteCall[list[Any]]:
        """As `call`, returning at once."""
        return self._begin(method, [arguments] * len(self.engines))

    def prepare_receive(self, handover: Handover) -> None:
        """Have each engine plan what it receives of the trainer's ranks; raises as `wait_all` does."""
        ref = ray.put(handover)
        self._begin("prepare_receive", [(ref, number) for number in range(len(self.engines))]).result(self._timeout)

    def _begin(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> RemoteCall[list[Any]]:
        """Args:
        arguments: by engine.
        """
        refs = [engine.handle.invoke.remote(method, *own) for engine, own in zip(self.engines, arguments, strict=True)]
        names = {ref: engine.name for ref, engine in zip(refs, self.engines, strict=True)}
        return RemoteCall(refs, list, method, names)


class EngineGroup(Engines):
    """All engines of a run. Rank r of engine i runs on slot `servers[i][r]` of the pool.

    In the trainer's pool, that is beside the trainer rank that serves it.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: SlotPool,
        servers: Sequence[Sequence[int]],
        restarts: Restarts | None = None,
    ) -> None:
        """Args:
        restarts: the run's budget; None: one of their own, of which the user hears nothing.
        """
        super().__init__([], servers, pool, config.weight_sync.timeout_seconds)
        self._config = config
        self.asked = time.time()
        """When Ray was asked for their processes."""
        self.supervision = Supervision(
            self, len(servers), config, restarts or Restarts(config.recovery, lambda text: None)
        )
        self.supervision.start()

    def wait_started(self) -> None:
        """Block until every engine answers.

        Raises:
            WorkerError: one did not come up.
        """
        self.supervision.wait_started()

    def came_up(self) -> list[ProcessStart]:
        """How each engine's process did."""
        refs = [engine.handle.came_up.remote() for engine in self.engines]
        names = {ref: engine.name for ref, engine in zip(refs, self.engines, strict=True)}
        return wait_all(refs, what="start", names=names, timeout=self._timeout)

    def actors(self) -> dict[str, Any]:
        """Ray actors by their names for people."""
        return {engine.name: engine.handle for engine in self.engines}

    def first_completion(self) -> float:
        """When the first one was finished on any engine, in Unix time; now, if no engine is left that has seen one."""
        times = []
        for number in self.supervision.serving:
            try:
                times += self.only([number]).call("first_completion")
            except WorkerError:
                continue  # it is lost, and supervised
        return min((when for when in times if when is not None), default=time.time())

    def remote_engines(self) -> list[RemoteEngine | None]:
        """For rollout workers; None in the place of one that does not serve."""
        serving = self.supervision.serving
        return [
            RemoteEngine(engine.handle, engine.name) if number in serving else None
            for number, engine in enumerate(self.engines)
        ]

    def only(self, replicas: Sequence[int]) -> Engines:
        """These, as they are now."""
        chosen = [self.engines[replica] for replica in replicas]
        return Engines(chosen, [self.servers[replica] for replica in replicas], self.pool, self._timeout)

    def name(self, replica: int) -> str:
        """For people."""
        return f"engine {replica}"

    def handle(self, replica: int) -> Any:
        """The engine's Ray actor, an AsyncShell."""
        return self.engines[replica].handle

    def has_machine(self, replica: int) -> bool:
        """Whether the machine of the engine's slots is there."""
        there = {node.id for node in cluster_nodes()}
        return all(self.pool.slots[slot].node in there for slot in self.servers[replica])

    def start(self, replica: int) -> Any:
        """Put a new process in the place of an engine's; a reference that is ready once it is up, or has failed."""
        started, ref = self._launch(replica)
        self.engines[replica : replica + 1] = [started]  # behind the last one, where it is the next
        return ref

    def shutdown(self) -> None:
        """End the engines' processes in order, also while they start; one that is gone already is no error."""
        self.supervision.end()
        refs = [engine.handle.stop.remote() for engine in self.engines]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS)

    def _launch(self, replica: int) -> tuple[StartedEngine, Any]:
        config, device = self._config, self.pool.device
        slots = [self.pool.slots[rank] for rank in self.servers[replica]]
        environment = engine_environment(device, config.rollout.tp)
        if device == "cuda":
            # Ray would hide what it has not granted to this very process: all of the slots' GPUs where trainer ranks
            # have them, and else those of all slots but the first.
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        environment |= gpu_environment([slot.gpu_id for slot in slots])
        actor = ray.remote(AsyncShell).options(
            num_cpus=slots[0].cpus if config.engines_apart else 0,
            num_gpus=slots[0].gpus if config.engines_apart else 0,
            max_restarts=0,
            max_concurrency=10_000,  # every request in flight is a call
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.pool.group, slots[0].bundle),
            runtime_env={"env_vars": environment},
        )
        handle = actor.remote(environment)
        spec = engine_spec(config, replica, device)
        ref = handle.build.remote(_start_engine, (spec,), environment, time.time())
        return StartedEngine(handle, self.name(replica)), ref


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
