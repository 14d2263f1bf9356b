"""A run with thousands of ranks, and its controller with actors that are not there."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from torch._C._distributed_c10d import TCPStore

from benchmarks.reshard.fake_ray import FakeRay, Serialized
from benchmarks.reshard.published import DEEPSEEK_V3, QWEN3_8B, engine_layouts
from benchmarks.reshard.scale_engine import engine_rank_cost, signaled_sender
from benchmarks.reshard.scale_rank import (
    MemoryGrowth,
    RankCost,
    measure_sync,
    meta_tensors,
    peers_outside_machine,
)
from megarl.cli.tools.reshard_explain import GEN_AXES, TRAIN_AXES, parse_sizes
from megarl.cluster.placement.pool import Slot, SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.group import WorkerGroup
from megarl.config.rollout import WeightSyncConfig
from megarl.engines.engine import UpdateReport
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.trainer_layouts import PipelineSplit, trainer_layouts
from megarl.megatron.requests import PreparedSync, PushResult, SyncSetup
from megarl.reshard.layout.layout import WeightLayout, WeightNeeds
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.disaggregated import TransferRank, TransferSpec
from megarl.reshard.planning.plan_cache import release_indexes
from megarl.reshard.planning.strategy import SyncContext, SyncStats
from megarl.reshard.strategies.box_strategy import plan_boxes
from megarl.reshard.transfer.box_channel import BoxOffer
from megarl.reshard.transfer.bucket import Parameters
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, TransferredBytes
from megarl.reshard.transfer.process_groups import exchange_layouts
from megarl.run.remote.engine_group import EngineHandles, StartedEngine
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.sync.weight_sync import WeightSync

ArrangementName = Literal["colocated", "disaggregated"]

MODELS = {"deepseek-v3": DEEPSEEK_V3, "qwen3-8b": QWEN3_8B}
DTYPE = "bfloat16"
STATS = SyncStats(bytes_sent=0, bytes_received=0, bytes_delivered=0, buckets=0, peak_extra_bytes=0)


@dataclass(frozen=True, kw_only=True)
class ScaleCase:
    """A run at scale."""

    grid: RankGrid
    sources: Sequence[WeightLayout]
    """By trainer rank, the layout it holds."""
    needs: WeightNeeds
    num_engines: int
    ranks_per_machine: int
    arrangement: ArrangementName
    config: WeightSyncConfig

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of all engines."""
        return self.num_engines * len(self.needs.layouts)

    @property
    def machines(self) -> list[str]:
        """The machine of each slot: those of trainer ranks and, if disaggregated, those of engine ranks."""
        sizes = {"trainer": len(self.sources), "engines": self.engine_ranks if self.is_disaggregated else 0}
        return [f"{kind} {i // self.ranks_per_machine}" for kind, size in sizes.items() for i in range(size)]

    @property
    def is_disaggregated(self) -> bool:
        """Whether engines have machines of their own."""
        return self.arrangement == "disaggregated"


def make_case(
    model: str, train: str, gen: str, *, ranks: int, engine_ranks: int, arrangement: ArrangementName, machine: int = 8
) -> ScaleCase:
    """Return a case; `machine`: ranks per machine. The last pipeline stage gets the layers that the others leave."""
    architecture = load_architecture(MODELS[model], origin=model)
    sizes, tp = parse_sizes("--train", train, TRAIN_AXES), parse_sizes("--gen", gen, GEN_AXES).get("tp", 1)
    chunks, pp = sizes.pop("vpp", 1), sizes.get("pp", 1)
    if architecture.num_experts:
        sizes.setdefault("etp", 1)
    sizes.setdefault("dp", ranks // (pp * sizes.get("tp", 1) * sizes.get("cp", 1)))
    last = architecture.num_layers - (pp - 1) * -(-architecture.num_layers // pp)
    split = PipelineSplit(num_chunks=chunks, last=last if architecture.num_layers % pp else None)
    grid = RankGrid(**sizes)
    sources = trainer_layouts(architecture, grid, DTYPE, split)
    needs = WeightNeeds(layouts=tuple(engine_layouts(sources[0].tensors, tp)), full_tensors=())
    return ScaleCase(
        grid=grid,
        sources=sources,
        needs=needs,
        num_engines=engine_ranks // tp,
        ranks_per_machine=machine,
        arrangement=arrangement,
        config=WeightSyncConfig(strategy="exact", verify=None),
    )


class FakeController:
    """The controller of a case, with actors that are not there."""

    def __init__(self, case: ScaleCase) -> None:
        self._case, self.gathered = case, [layout.tensors.digest + layout.pieces.to_bytes() for layout in case.sources]
        """What each trainer rank sends to all others."""
        self.ray = FakeRay(self._answer)
        self._fixed: dict[str, Serialized] = {}
        self._stores: dict[int, TCPStore] = {}
        stats = (STATS,) * len(case.needs.layouts) if case.is_disaggregated else ()
        self._values = {
            "weight_needs": case.needs,
            "weight_needs_digest": case.needs.digest,
            "push_weights": PushResult(stats=STATS),
            "update_weights": UpdateReport(stats=stats, open_seconds=0.0, commit_seconds=0.0),
        }

    def measure(self) -> dict[str, Any]:
        """Connect and push once; return the report's figures of the controller."""
        with self.ray.installed():
            before = self._mark()
            sync = self._make()
            connected = self._mark()
            sync.push(1)
            pushed = self._mark()
        found: dict[str, Any] = {}
        for name, (start, end) in {"connect": (before, connected), "sync": (connected, pushed)}.items():
            seconds, calls, fan_outs = (b - a for a, b in zip(start, end, strict=True))
            found |= {f"controller_{name}_cpu_seconds": seconds}
            found |= {f"ray_calls_{name}": calls, f"fan_outs_{name}": fan_outs}
        return found

    def _mark(self) -> tuple[float, int, int]:
        return time.process_time() - self.ray.answer_seconds, self.ray.num_calls, len(self.ray.fan_outs)

    def _make(self) -> WeightSync:
        case = self._case
        tp, machines = len(case.needs.layouts), case.machines
        slots = tuple(Slot(i, 1.0, 0.0, machine, None) for i, machine in enumerate(machines))
        trainer_slots = slots[: len(case.sources)]
        pool = SlotPool(None, trainer_slots, "cpu")
        engine_pool = SlotPool(None, slots[len(case.sources) :], "cpu") if case.is_disaggregated else pool
        actors = [self.ray.actor(f"rank {rank}") for rank in range(len(case.sources))]
        processes: Any = SimpleNamespace(actors=actors, relays=[])  # with relays there are fewer calls
        offload: Any = SimpleNamespace(is_enabled=False)
        cost: Any = None
        trainer = TrainerGroup(WorkerGroup("trainer", processes, case.grid), cost=cost, offload_config=offload)
        started = [StartedEngine(self.ray.actor(f"engine {i}"), f"engine {i}") for i in range(case.num_engines)]
        engine_slots = [range(tp * i, tp * (i + 1)) for i in range(case.num_engines)]
        engines: Any = EngineHandles(started, engine_slots, engine_pool, case.config.timeout_seconds)
        ready = list(range(case.num_engines))
        engines.supervisor = SimpleNamespace(
            wait_ready=lambda: ready, mark_serving=lambda _: None, attribute_failure=lambda _: False, restore=None
        )
        engines.select = lambda _: engines
        config: Any = SimpleNamespace(
            weight_sync=case.config, rollout=SimpleNamespace(tp=tp), disaggregated=case.is_disaggregated
        )
        return WeightSync.between(config, trainer, engines, pool)

    def _answer(self, actor: str, method: str, arguments: tuple[Any, ...]) -> Serialized:
        if method == "prepare_sync":
            return Serialized.of(self._prepared(int(actor.split()[1]), arguments))
        if method == "update_weights":
            update: Any = arguments[1]
            CommitDecision(update.commit, self._store(update.commit)).report_received(TransferredBytes())
        if method not in self._fixed:
            self._fixed[method] = Serialized.of(self._values.get(method))
        return self._fixed[method]

    def _prepared(self, rank: int, arguments: Sequence[Any]) -> PreparedSync:
        """Return what a trainer rank answers to `prepare_sync`."""
        if self._case.is_disaggregated:
            spec = self._setup(arguments).transfer_spec if rank == 0 else None
            return PreparedSync(transfer_spec=None if spec is None else replace(spec, sources=self._exchange(0)))
        if rank >= self._case.engine_ranks:
            return PreparedSync()
        offer = BoxOffer(f"trainer rank {rank}", f"megarl-weights-{rank:032x}", "/proc/1234567/fd/1234", 10**6)
        return PreparedSync(offers={rank: offer})

    def _store(self, commit: CommitSpec) -> TCPStore:
        """Return the connection that each engine would keep."""
        if commit.port not in self._stores:
            self._stores[commit.port] = commit.connect()
        return self._stores[commit.port]

    def _setup(self, arguments: Sequence[Any]) -> SyncSetup:
        setup: SyncSetup = arguments[1].fetch()
        return setup

    def _exchange(self, rank: int) -> list[WeightLayout]:
        return exchange_layouts(self._case.sources[rank], rank, lambda _: self.gathered)

    def rank_request(self, rank: int) -> tuple[Serialized, int]:
        """Return the serialized arguments of `prepare_sync` of a trainer rank, and the bytes sent to it."""
        arguments = self.ray.sent[f"rank {rank}", "prepare_sync"]
        setup: Any = arguments[1]
        stored = self.ray.stored_bytes(setup.ref)
        return Serialized.of(arguments), self.ray.sent_bytes[f"rank {rank}", "prepare_sync"] + stored

    def spec_file(self) -> bytes:
        """Return what the host of an engine passes on to its TP ranks."""
        ref: Any = self.ray.sent["engine 0", "join_trainer"][1]
        return pickle.dumps(self.ray.get(ref))

    def measure_trainer_rank(self, rank: int) -> RankCost:
        """Return the cost of a trainer rank; to be called in a child."""
        case, (arguments, _) = self._case, self.rank_request(rank)
        memory, cost, began = MemoryGrowth(), RankCost(), time.process_time()
        with self.ray.installed():
            setup = self._setup(arguments.load())
        layouts = self._exchange(rank)
        nodes: Sequence[int] = setup.nodes
        if setup.transfer_spec is not None:
            spec = replace(setup.transfer_spec, sources=layouts)
            transfer, nodes = TransferRank(spec, rank), spec.nodes
            plan = transfer.plan
            del spec
        else:
            context = SyncContext(rank=rank, sources=layouts, topology=Topology(setup.nodes), needs=setup.needs)
            plan = plan_boxes(context, setup.config.bucket_bytes)
            release_indexes()
            del context
        has_engine = rank in setup.receivers
        del setup, layouts
        cost.connect_cpu_seconds = time.process_time() - began
        cost.connect_host_mb, cost.connect_peak_mb = memory.kept_mb(), memory.peak_mb()
        cost.peers_outside_machine = peers_outside_machine(rank, plan, nodes)
        held = meta_tensors(case.sources[rank])
        if not has_engine:
            measure_sync(cost, rank, plan, held, None)
            return cost
        with signaled_sender(rank, [each.slots for each in plan.rounds]) as sender:
            measure_sync(cost, rank, plan, held, sender)
            parameters = meta_tensors(case.needs.layouts[rank % len(case.needs.layouts)])
            of_engine = engine_rank_cost(sender, parameters, plan.buffer_sizes.bucket)
        cost.engine_rank_connect_cpu_seconds = of_engine.connect_cpu_seconds
        cost.engine_rank_sync_cpu_seconds = of_engine.sync_cpu_seconds
        return cost

    def measure_engine_rank(self, file: bytes, engine: int, tp_rank: int) -> RankCost:
        """Return the cost of an engine's TP rank that receives over the network; to be called in a child."""
        memory, cost, began = MemoryGrowth(), RankCost(), time.process_time()
        spec: TransferSpec = pickle.loads(file)
        rank, nodes = spec.engine_rank(engine, tp_rank), spec.nodes
        transfer = TransferRank(spec, rank)
        del spec
        cost.connect_cpu_seconds = time.process_time() - began
        cost.connect_host_mb, cost.connect_peak_mb = memory.kept_mb(), memory.peak_mb()
        cost.peers_outside_machine = peers_outside_machine(rank, transfer.plan, nodes)
        target = Parameters(meta_tensors(self._case.needs.layouts[tp_rank]))
        measure_sync(cost, rank, transfer.plan, {}, target)
        return cost
