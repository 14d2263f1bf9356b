"""The controller's handles on the rollout engines of a run, each of which is a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.batch.trajectory import EngineRoutes
from megarl.cluster.placement.assign import RecentNodes
from megarl.cluster.placement.pool import Slot, SlotPool
from megarl.cluster.process.ports import find_unused_port, join_address
from megarl.cluster.process.process_start import StartupTiming, record_imports
from megarl.cluster.workers.failures import results_in_time, wait_all
from megarl.cluster.workers.group import RemoteCall
from megarl.cluster.workers.worker_host import AsyncWorkerHost
from megarl.config import RunConfig
from megarl.config.rollout import EngineConfig
from megarl.engines.engine import EngineMemory
from megarl.engines.engine_spec import EngineSpec, make_engine_spec
from megarl.engines.sglang.engine_environment import make_engine_environment
from megarl.engines.sglang.scheduler_process import open_process_gate
from megarl.errors import MegarlError, WeightSyncError
from megarl.reshard.layout.layout import WeightNeeds
from megarl.run.remote.remote_engine import EngineSink, RemoteEngine, RemoteNode
from megarl.run.supervision.engine_supervisor import EngineSupervisor
from megarl.run.supervision.restart_budget import RestartBudget

if TYPE_CHECKING:
    from megarl.engines.custom_engine import CustomEngineHost
    from megarl.engines.sglang.sglang_engine import SglangEngine
    from megarl.reshard.planning.disaggregated import TransferSpec
    from megarl.reshard.transfer.process_groups import TransferGroup
from collections.abc import Iterable
from itertools import chain

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.reshard.layout.engine_ranks import (
    TensorGroup,
    can_place_strided,
    place_engines_by_overlap,
    place_engines_consecutively,
    place_engines_strided,
    require_single_node_groups,
    resolve_strategy,
)
from megarl.reshard.layout.quantized_layout import convert_sources
from megarl.reshard.layout.topology import Topology


def pool_topology(pool: SlotPool) -> Topology:
    """Return the node index of each slot, which is that of each trainer rank."""
    return Topology(node_indices(pool.slots))


def node_indices(slots: Iterable[Slot]) -> tuple[int, ...]:
    """Return the node index of each slot, numbered in the order of appearance."""
    number: dict[str, int] = {}
    return tuple(number.setdefault(slot.node, len(number)) for slot in slots)


def place_dedicated_engines(config: RunConfig, pool: SlotPool) -> list[TensorGroup]:
    """Return [engine][tensor rank] -> slot for engines with a pool of their own.

    An engine has consecutive slots of one node, or all slots of `nodes_per_engine` consecutive nodes.

    Raises:
        ConfigError: the nodes have too few slots.
    """
    tp, replicas, nodes = config.rollout.tp, config.rollout.replicas, pool_topology(pool).nodes
    slots_of_nodes = [[slot for slot, at in enumerate(nodes) if at == node] for node in range(len(set(nodes)))]
    spanned = config.nodes_per_engine
    groups: list[TensorGroup] = []
    for first in range(0, len(slots_of_nodes) - spanned + 1, spanned):
        here = list(chain.from_iterable(slots_of_nodes[first : first + spanned]))
        groups += [tuple(here[i : i + tp]) for i in range(0, len(here) - tp + 1, tp)]
    if len(groups) < replicas:
        where = "one node" if spanned == 1 else f"{spanned} nodes"
        raise ConfigError(
            f"rollout.replicas: each engine needs rollout.tp = {tp} slots of {where}, which the pool has "
            f"for {len(groups)} engines, got {replicas}"
        )
    return groups[:replicas]


def place_engines(config: RunConfig, pool: SlotPool, grid: RankGrid) -> list[TensorGroup]:
    """Return [engine][tensor rank] -> trainer rank on whose slot it runs, for colocated engines.

    An engine stays on one node, because weights are passed on in shared memory.

    Raises:
        ConfigError: `micro_dp` does not support these sizes on these nodes, or an engine fits on no node.
    """
    tp, replicas, topology = config.rollout.tp, config.rollout.replicas, pool_topology(pool)
    strategy = resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp)
    match strategy:
        case "gather_hf":
            placements = place_engines_consecutively(replicas, gen_tp=tp)
        case "exact" if not can_place_strided(grid, topology, gen_tp=tp):
            return _place_by_overlap(config, pool.device, grid, topology)
        case _:
            placements = place_engines_strided(grid, gen_tp=tp)[:replicas]
    require_single_node_groups(strategy, placements, topology)
    return placements


def _place_by_overlap(config: RunConfig, device: str, grid: RankGrid, topology: Topology) -> list[TensorGroup]:
    """Place engines where their ranks already hold most of what they need.

    Neither side has been built yet: the trainer's layouts come from its architecture, the engine's from a trace.
    """
    from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts  # imports torch

    model, _ = load_architecture_and_dtype(config.model.path, family=config.model.family)
    settings, dtype = config.rollout.engine, make_engine_spec(config, 0, device).dtype
    engine = trace_layouts(
        config.model.path,
        tp=config.rollout.tp,
        ep=settings.ep_size,
        options=settings.layout_options,
        device=device,
        dtype=dtype,
    )
    sources = convert_sources(trainer_layouts(model, grid, dtype), engine)
    return place_engines_by_overlap(sources, engine, replicas=config.rollout.replicas, topology=topology)


def _engine_routes(config: RunConfig) -> EngineRoutes | None:
    """Return the form of the routes that the run's engines return; None: they return none."""
    if config.trainer.moe.router_replay != "R3":
        return None
    model, _ = load_architecture_and_dtype(config.model.path, family=config.model.family)
    assert model.experts is not None, f"{model.name} has no experts"
    has_experts = [layer.has_routed_experts for layer in model.layers]
    return EngineRoutes.of(has_experts, top_k=model.experts.routing.top_k, num_experts=model.num_experts)


SHUTDOWN_SECONDS = 3.0
"""Time allowed for engines to shut down gracefully, before Ray kills their processes."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The Ray actors of an engine and its name in messages."""

    handle: ray.actor.ActorHandle
    name: str
    others: tuple[RemoteNode, ...] = ()
    """The other nodes that the engine spans."""


class EngineHandles:
    """Some or all engines of a run, called together; engine i has the slots `engine_slots[i]` of the pool."""

    def __init__(
        self, engines: Sequence[StartedEngine], engine_slots: Sequence[Sequence[int]], pool: SlotPool, timeout: float
    ) -> None:
        self.engines, self.engine_slots, self.pool, self._timeout = list(engines), engine_slots, pool, timeout

    def weight_needs(self) -> WeightNeeds:
        """Return what every engine needs of the weights: one engine sends it, the others a digest of theirs.

        Raises:
            WeightSyncError: an engine needs other weights than the first; names it.
        """
        methods = ["weight_needs", *["weight_needs_digest"] * (len(self.engines) - 1)]
        refs = [engine.handle.invoke.remote(method) for engine, method in zip(self.engines, methods, strict=True)]
        first, *digests = self._remote_call("weight_needs", refs).result(self._timeout)
        needs: WeightNeeds = first
        for engine, digest in zip(self.engines[1:], digests, strict=True):
            if digest != needs.digest:
                raise WeightSyncError(
                    f"{engine.name} does not hold the weights in the layout of {self.engines[0].name}: all engines of "
                    f"a run need the same model, tensor-parallel size and versions of SGLang and megarl"
                )
        return needs

    def sinks(self) -> tuple[EngineSink, ...]:
        """Return a sink for each engine, for the trainer rank that sends full tensors to it."""
        return tuple(EngineSink(engine.handle, engine.name, self._timeout) for engine in self.engines)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call `method` on every engine and return the results in order; raises as `wait_all` does."""
        return self.begin(method, *arguments).result(self._timeout)

    def begin(self, method: str, *arguments: object) -> RemoteCall[list[Any]]:
        """Begin `call`; returns at once."""
        return self.begin_each(method, [arguments] * len(self.engines))

    def begin_join(self, transfer_spec: TransferSpec, transfer_group: TransferGroup) -> RemoteCall[list[Any]]:
        """Make each engine plan what it receives from the trainer ranks, and then connect with them; returns at once.

        The trainer ranks have to connect at the same time.
        """
        ref = ray.put(transfer_spec)
        return self.begin_each("join_trainer", [(ref, i, transfer_group) for i in range(len(self.engines))])

    def begin_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> RemoteCall[list[Any]]:
        """Begin a call of `method` on every engine; `arguments`: those of each engine."""
        refs = [engine.handle.invoke.remote(method, *own) for engine, own in zip(self.engines, arguments, strict=True)]
        return self._remote_call(method, refs)

    def _remote_call(self, what: str, refs: Sequence[ray.ObjectRef]) -> RemoteCall[list[Any]]:
        return RemoteCall(refs, list, what, {ref: e.name for ref, e in zip(refs, self.engines, strict=True)})


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
        *,
        waits_for_memory: bool = False,
    ) -> None:
        """Args:
        waits_for_memory: only request the processes, which import SGLang; `begin_start` has to follow.
        restart_budget: the run's budget; None: a budget of its own, whose messages are not shown.
        """
        super().__init__([], engine_slots, pool, config.weight_sync.timeout_seconds)
        self._config = config
        self.waits_for_memory = waits_for_memory
        """Whether engines that start now wait for `resume` before they allocate device memory."""
        self._mem_fraction = config.rollout.engine.mem_fraction
        self._nodes = RecentNodes()
        self._remote_engines: list[RemoteEngine] = []
        self._processes: dict[int, list[ray.actor.ActorHandle]] = {}
        """By replica, processes that were requested for its first start and are not used yet."""
        self.requested_at = time.time()
        """Unix time at which the engines' processes were requested from Ray."""
        self.supervisor = EngineSupervisor(
            self, len(engine_slots), config, restart_budget or RestartBudget(config.recovery, lambda text: None)
        )
        if waits_for_memory:
            self._request_processes()
        else:
            self.supervisor.start()

    def begin_start(self, mem_fraction: float | None) -> None:
        """Begin to start the engines, which import SGLang and wait for `resume`; returns at once.

        Args:
            mem_fraction: of the device memory that will be free then, for weights and KV cache; None: SGLang chooses.
        """
        self._mem_fraction = mem_fraction
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
        """Return the Ray actors of all nodes by their names in messages."""
        others = {f"{engine.name} on {node.name}": node.handle for engine in self.engines for node in engine.others}
        return {engine.name: engine.handle for engine in self.engines} | others

    def first_completion_time(self) -> float:
        """Return the Unix time of the first completion on any engine; now if no live engine has had one."""
        serving = [self.engines[number] for number in self.supervisor.serving]
        names = {engine.handle.invoke.remote("first_completion_time"): engine.name for engine in serving}
        times = results_in_time(names, self._timeout).values()  # the supervisor restarts those that are lost
        return min((when for when in times if when is not None), default=time.time())

    def remote_engines(self) -> list[RemoteEngine | None]:
        """Return a handle of each engine for rollout workers, the same until it is lost; None if it does not serve."""
        serving = set(self.supervisor.serving)
        return [engine if number in serving else None for number, engine in enumerate(self._remote_engines)]

    def select(self, replicas: Sequence[int]) -> EngineHandles:
        """Return handles of the current processes of these replicas."""
        chosen = [self.engines[replica] for replica in replicas]
        return EngineHandles(chosen, [self.engine_slots[replica] for replica in replicas], self.pool, self._timeout)

    def name(self, replica: int) -> str:
        """Return the engine's name for messages."""
        return f"engine {replica}"

    def handles(self, replica: int) -> list[ray.actor.ActorHandle]:
        """Return the engine's Ray actors, which are AsyncWorkerHosts: the engine, then those of its other nodes."""
        return _handles(self.engines[replica])

    def has_live_node(self, replica: int) -> bool:
        """Return whether all nodes of the engine's slots are alive."""
        alive = self._nodes.by_id()
        return all(self.pool.slots[slot].node in alive for slot in self.engine_slots[replica])

    def may_allocate(self) -> bool:
        """Return whether the devices have memory for engines that start now."""
        return not self.waits_for_memory

    def start(self, replica: int) -> ray.ObjectRef:
        """Start new processes for the engine; return a Ray reference that resolves when it has started or failed."""
        started, ref = self._launch(replica)
        # both append at the first start, and replace at a restart
        self.engines[replica : replica + 1] = [started]
        self._remote_engines[replica : replica + 1] = [RemoteEngine(started.handle, started.name)]
        return ref

    def release(self, memory: Sequence[EngineMemory]) -> None:
        """Free these kinds of device memory on all engines; engines restarted before the next `resume` wait for it."""
        self.waits_for_memory = True
        self._call_serving("release", tuple(memory))

    def resume(self, memory: Sequence[EngineMemory]) -> None:
        """Allocate these kinds of device memory on all engines, and let those that wait allocate theirs."""
        self.waits_for_memory = False
        for replica in self.supervisor.starting:
            for handle in self.handles(replica):
                handle.run.remote(open_process_gate)
        self._call_serving("resume", tuple(memory))

    def abort_all(self) -> None:
        """End the requests in flight on all engines."""
        self._call_serving("abort_all")

    def _call_serving(self, method: str, *arguments: object) -> None:
        """Call `method` on the engines that serve, and again if one of them is lost meanwhile."""
        is_done = False
        while not is_done:
            try:
                self.select(self.supervisor.serving).call(method, *arguments)
                is_done = True
            except MegarlError as error:
                if not self.supervisor.attribute_failure(error):
                    raise

    def shutdown(self) -> None:
        """Stop the engines' processes gracefully, even while they start; ignores processes that have ended."""
        self.supervisor.close()
        unused = [handle for handles in self._processes.values() for handle in handles]
        handles = [*unused, *(handle for engine in self.engines for handle in _handles(engine))]
        refs = [handle.stop.remote() for handle in handles]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS)

    def _launch(self, replica: int) -> tuple[StartedEngine, ray.ObjectRef]:
        """Create a process on each node of the engine; the first one starts the engine on all of them."""
        spec = make_engine_spec(self._config, replica, self.pool.device)
        spec = replace(
            spec,
            mem_fraction=self._mem_fraction,
            waits_for_memory=self.waits_for_memory,
            routes=_engine_routes(self._config),
        )
        by_node = self._slots_by_node(replica)
        environments = [self._make_environment(here) for here in by_node]
        handles = self._processes.pop(replica, None) or self.create_actors(by_node)
        others: tuple[RemoteNode, ...] = ()
        if spec.nnodes > 1:
            nodes = {node.id: (node.name, node.address) for node in self._nodes.by_id().values()}
            lost = ("a lost node", "")
            specs = [spec.on_node(rank, *nodes.get(here[0].node, lost)) for rank, here in enumerate(by_node)]
            spec, others = specs[0], tuple(map(RemoteNode, handles[1:], specs[1:], environments[1:]))
        start: Callable[..., Any] = _start_engine
        arguments: tuple[object, ...] = (spec, others)
        if self._config.rollout.engine.is_custom:
            start, arguments = _start_custom_engine, (spec, self._config.rollout.engine)
        ref = handles[0].build.remote(start, arguments, environments[0], time.time())
        return StartedEngine(handles[0], self.name(replica), others), ref

    def _request_processes(self) -> None:
        """Request the processes of all engines, which import SGLang."""
        for replica in range(len(self.engine_slots)):
            self._processes[replica] = self.create_actors(self._slots_by_node(replica))
            for handle in self._processes[replica] if not self._config.rollout.engine.is_custom else ():
                handle.run.remote(import_engine)

    def _slots_by_node(self, replica: int) -> list[list[Slot]]:
        slots = [self.pool.slots[rank] for rank in self.engine_slots[replica]]
        size = len(slots) // self._config.nodes_per_engine
        return [slots[i : i + size] for i in range(0, len(slots), size)]

    def create_actors(self, by_node: Sequence[Sequence[Slot]]) -> list[ray.actor.ActorHandle]:
        """Request the processes of one engine from Ray, one on each node."""
        return [self._create_actor(here, self._make_environment(here)) for here in by_node]

    def _make_environment(self, slots: Sequence[Slot]) -> dict[str, str]:
        """Return the environment variables of an engine's process on the node of `slots`."""
        environment = make_engine_environment(self.pool.device, self._config.rollout.tp)
        if self.pool.device == "cuda":
            # Otherwise Ray hides the GPUs that it has not assigned to this process: those of all slots if trainer ranks
            # own them, else those of all slots but the first.
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        return environment | gpu_environment([slot.gpu_id for slot in slots])

    def _create_actor(self, slots: Sequence[Slot], environment: Mapping[str, str]) -> ray.actor.ActorHandle:
        """Create a process on the node of `slots`, which holds the resources of the first slot if engines have any."""
        disaggregated = self._config.disaggregated
        actor = ray.remote(AsyncWorkerHost).options(
            num_cpus=slots[0].cpus if disaggregated else 0,
            num_gpus=slots[0].gpus if disaggregated else 0,
            max_restarts=0,
            max_concurrency=10_000,  # every request in flight is a call
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.pool.group, slots[0].bundle),
            runtime_env={"env_vars": environment},
        )
        return actor.remote(environment)


def _handles(engine: StartedEngine) -> list[ray.actor.ActorHandle]:
    return [engine.handle, *(node.handle for node in engine.others)]


def gpu_environment(gpu_ids: Sequence[int | None]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the engine's GPUs in the order of its ranks; empty without GPUs."""
    ids = [str(gpu_id) for gpu_id in gpu_ids if gpu_id is not None]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}


def import_engine() -> None:
    """Import SGLang in an engine's process ahead of its start."""
    with record_imports():
        import megarl.engines.sglang.sglang_engine  # noqa: F401 -- imported for the engine


async def _start_engine(spec: EngineSpec, nodes: tuple[RemoteNode, ...]) -> SglangEngine:
    with record_imports():  # here, because the controller does without torch until all processes are requested
        from megarl.engines.sglang.sglang_engine import SglangEngine

    if nodes:
        spec = replace(spec, dist_init_addr=join_address(spec.node_address, spec.port or find_unused_port()))
    engine = SglangEngine(spec, nodes)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(engine.shutdown)
        await engine.start()
        closing.pop_all()
    return engine


async def _start_custom_engine(spec: EngineSpec, config: EngineConfig) -> CustomEngineHost:
    with record_imports():
        from megarl.engines.custom_engine import CustomEngineHost

        engine = CustomEngineHost(spec, config)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(engine.shutdown)
        await engine.start()
        closing.pop_all()
    return engine
