"""The controller's handles on the rollout engines of a run, each of which is a process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import RunConfig
from megarl.errors import WorkerError
from megarl.groups.remote_engine import EngineRankSink, EngineSink, RemoteEngine
from megarl.placement.nodes import cluster_nodes
from megarl.placement.pool import SlotPool
from megarl.process.startup_trace import StartupTiming, record_imports
from megarl.reshard.layout.layout import WeightLayout
from megarl.rollout.engine_spec import EngineSpec, make_engine_spec
from megarl.rollout.sglang.engine_environment import make_engine_environment
from megarl.supervision.engine_supervisor import EngineSupervisor
from megarl.supervision.restart_budget import RestartBudget
from megarl.workers.failures import wait_all
from megarl.workers.group import RemoteCall
from megarl.workers.worker_host import AsyncWorkerHost

if TYPE_CHECKING:
    from megarl.reshard.planning.disaggregated import TransferSpec
    from megarl.rollout.sglang.sglang_engine import SglangEngine

SHUTDOWN_SECONDS = 3.0
"""Time allowed for engines to shut down gracefully, before Ray kills their processes."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The Ray actor of an engine and its name in messages."""

    handle: ray.actor.ActorHandle
    name: str


class EngineHandles:
    """Some or all engines of a run, called together; engine i has the slots `engine_slots[i]` of the pool."""

    def __init__(
        self, engines: Sequence[StartedEngine], engine_slots: Sequence[Sequence[int]], pool: SlotPool, timeout: float
    ) -> None:
        self.engines, self.engine_slots, self.pool, self._timeout = list(engines), engine_slots, pool, timeout

    def layouts(self) -> list[WeightLayout]:
        """Return the weight layout of an engine by tensor rank; all replicas have the same."""
        first: list[WeightLayout] = self.call("layouts")[0]
        return first

    def full_tensors(self) -> tuple[str, ...]:
        """Tensors that every engine takes through its sink of `sinks`, also where all others go to `rank_sink`s."""
        first: tuple[str, ...] = self.call("full_tensors")[0]
        return first

    def rank_sink(self, replica: int, tp_rank: int) -> EngineRankSink:
        """Return the sink through which the trainer rank on the same slot sends boxes to this engine rank."""
        engine = self.engines[replica]
        return EngineRankSink(engine.handle, engine.name, tp_rank, self._timeout)

    def sinks(self) -> tuple[EngineSink, ...]:
        """Return a sink for each engine, for the trainer rank that sends full tensors to it."""
        return tuple(EngineSink(engine.handle, engine.name, self._timeout) for engine in self.engines)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call `method` on every engine and return the results in order; raises as `wait_all` does."""
        return self.begin(method, *arguments).result(self._timeout)

    def begin(self, method: str, *arguments: object) -> RemoteCall[list[Any]]:
        """Begin `call`; returns at once."""
        return self._begin(method, [arguments] * len(self.engines))

    def prepare_receive(self, transfer_spec: TransferSpec) -> None:
        """Make each engine plan what it receives from the trainer ranks; raises as `wait_all` does."""
        ref = ray.put(transfer_spec)
        self._begin("prepare_receive", [(ref, number) for number in range(len(self.engines))]).result(self._timeout)

    def _begin(self, method: str, arguments: Sequence[tuple[object, ...]]) -> RemoteCall[list[Any]]:
        """Begin a call of `method` on every engine; `arguments`: those of each engine."""
        refs = [engine.handle.invoke.remote(method, *own) for engine, own in zip(self.engines, arguments, strict=True)]
        names = {ref: engine.name for ref, engine in zip(refs, self.engines, strict=True)}
        return RemoteCall(refs, list, method, names)


class EngineGroup(EngineHandles):
    """All engines of a run, supervised. Rank r of engine i runs on slot `engine_slots[i][r]` of the pool.

    In the trainer's pool (colocated engines) a slot has the number of the trainer rank that runs on it.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: SlotPool,
        engine_slots: Sequence[Sequence[int]],
        restart_budget: RestartBudget | None = None,
    ) -> None:
        """Args:
        restart_budget: the run's budget; None: a budget of its own, whose messages are not shown.
        """
        super().__init__([], engine_slots, pool, config.weight_sync.timeout_seconds)
        self._config = config
        self.requested_at = time.time()
        """Unix time at which the engines' processes were requested from Ray."""
        self.supervisor = EngineSupervisor(
            self, len(engine_slots), config, restart_budget or RestartBudget(config.recovery, lambda text: None)
        )
        self.supervisor.start()

    def wait_started(self) -> None:
        """Block until every engine has started.

        Raises:
            WorkerError: an engine did not start.
        """
        self.supervisor.wait_started()

    def startup_timing(self) -> list[StartupTiming]:
        """Return the startup timing of each engine's process."""
        refs = [engine.handle.startup_timing.remote() for engine in self.engines]
        names = {ref: engine.name for ref, engine in zip(refs, self.engines, strict=True)}
        return wait_all(refs, what="start", names=names, timeout=self._timeout)

    def actors(self) -> dict[str, ray.actor.ActorHandle]:
        """Return the Ray actors by their names in messages."""
        return {engine.name: engine.handle for engine in self.engines}

    def first_completion_time(self) -> float:
        """Return the Unix time of the first completion on any engine; now if no live engine has had one."""
        times = []
        for number in self.supervisor.serving:
            try:
                times += self.select([number]).call("first_completion_time")
            except WorkerError:
                continue  # the engine is lost; the supervisor restarts it
        return min((when for when in times if when is not None), default=time.time())

    def remote_engines(self) -> list[RemoteEngine | None]:
        """Return a handle of each engine for rollout workers; None for an engine that does not serve."""
        serving = self.supervisor.serving
        return [
            RemoteEngine(engine.handle, engine.name) if number in serving else None
            for number, engine in enumerate(self.engines)
        ]

    def select(self, replicas: Sequence[int]) -> EngineHandles:
        """Return handles of the current processes of these replicas."""
        chosen = [self.engines[replica] for replica in replicas]
        return EngineHandles(chosen, [self.engine_slots[replica] for replica in replicas], self.pool, self._timeout)

    def name(self, replica: int) -> str:
        """Return the engine's name for messages."""
        return f"engine {replica}"

    def handle(self, replica: int) -> ray.actor.ActorHandle:
        """Return the engine's Ray actor, an AsyncWorkerHost."""
        return self.engines[replica].handle

    def has_live_node(self, replica: int) -> bool:
        """Return whether the node of the engine's slots is alive."""
        alive = {node.id for node in cluster_nodes()}
        return all(self.pool.slots[slot].node in alive for slot in self.engine_slots[replica])

    def start(self, replica: int) -> ray.ObjectRef:
        """Start a new process for the engine; return a Ray reference that resolves when it has started or failed."""
        started, ref = self._launch(replica)
        self.engines[replica : replica + 1] = [started]  # appends at the first start, replaces at a restart
        return ref

    def shutdown(self) -> None:
        """Stop the engines' processes gracefully, even while they start; ignores processes that have ended."""
        self.supervisor.close()
        refs = [engine.handle.stop.remote() for engine in self.engines]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS)

    def _launch(self, replica: int) -> tuple[StartedEngine, ray.ObjectRef]:
        config, device = self._config, self.pool.device
        slots = [self.pool.slots[rank] for rank in self.engine_slots[replica]]
        environment = make_engine_environment(device, config.rollout.tp)
        if device == "cuda":
            # Otherwise Ray hides the GPUs that it has not assigned to this process: those of all slots if trainer ranks
            # own them, else those of all slots but the first.
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        environment |= gpu_environment([slot.gpu_id for slot in slots])
        actor = ray.remote(AsyncWorkerHost).options(
            num_cpus=slots[0].cpus if config.disaggregated else 0,
            num_gpus=slots[0].gpus if config.disaggregated else 0,
            max_restarts=0,
            max_concurrency=10_000,  # every request in flight is a call
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.pool.group, slots[0].bundle),
            runtime_env={"env_vars": environment},
        )
        handle = actor.remote(environment)
        spec = make_engine_spec(config, replica, device)
        ref = handle.build.remote(_start_engine, (spec,), environment, time.time())
        return StartedEngine(handle, self.name(replica)), ref


def gpu_environment(gpu_ids: Sequence[int | None]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the engine's GPUs in the order of its ranks; empty without GPUs."""
    ids = [str(gpu_id) for gpu_id in gpu_ids if gpu_id is not None]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}


async def _start_engine(spec: EngineSpec) -> SglangEngine:
    with record_imports():  # here, because the controller does without torch until all processes are requested
        from megarl.rollout.sglang.sglang_engine import SglangEngine

    engine = SglangEngine(spec)
    try:
        await engine.start()
    except BaseException:
        await engine.shutdown()
        raise
    return engine
