"""Handing the policy's weights from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.controller.engines import EngineGroup
from megarl.controller.servers import machines
from megarl.controller.trainer_group import TrainerGroup
from megarl.megatron.work import SyncSetup
from megarl.placement.grid import RankGrid
from megarl.placement.pool import SlotPool
from megarl.reshard.groups import micro_dp_groups
from megarl.reshard.placement import resolve_strategy
from megarl.reshard.strategy import Outlets, SyncStats
from megarl.tracking.phases import PhaseTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """One push."""

    stats: SyncStats
    seconds: Mapping[str, float]
    """`open`: until the engines have stopped decoding; `transfer`; `commit`: until they decode again."""

    @property
    def bytes_moved(self) -> int:
        """Between trainer ranks and to engines."""
        return self.stats.bytes_received + self.stats.bytes_delivered


class WeightSync:
    """Engines take a new version only once all of it has arrived at all of them."""

    def __init__(self, config: RunConfig, trainer: TrainerGroup, engines: EngineGroup, pool: SlotPool) -> None:
        self._trainer, self._engines = trainer, engines
        self._setup = sync_setup(config, trainer.grid, engines, pool)
        trainer.prepare_sync(self._setup)
        self._connected = True
        """The trainer's ranks have connections for pushes; one that failed has broken them."""
        self.policy_version = -1
        """What the engines hold; -1 before the first push."""

    def push(self, policy_version: int) -> PushReport:
        """Give the engines the trainer's current weights, as `policy_version`.

        Raises:
            WeightSyncError: they did not arrive whole; the engines refuse to serve until a push succeeds.
        """
        timer = PhaseTimer()
        with timer.phase("open"):
            self._engines.call("begin_weights")
        with timer.phase("transfer"):
            if not self._connected:
                self._trainer.prepare_sync(self._setup)
            self._connected = False
            stats = self._trainer.push_weights()
            self._connected = True
        with timer.phase("commit"):
            self._engines.call("end_weights", policy_version)
        self.policy_version = policy_version
        return PushReport(stats=stats, seconds=timer.totals)


def sync_setup(config: RunConfig, grid: RankGrid, engines: EngineGroup, pool: SlotPool) -> SyncSetup:
    """How weights travel in this run: boxes to each engine rank from the rank beside it.

    Whole tensors, which are all with `gather_hf` and otherwise those of which engines compute values of their own, go
    to each engine from the first of its servers.
    """
    tp, topology = config.rollout.tp, machines(pool)
    strategy = resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp)
    resolved = config.weight_sync.model_copy(update={"strategy": strategy})
    to_engines = {ranks[0]: sink for ranks, sink in zip(engines.servers, engines.sinks(), strict=True)}
    if strategy == "gather_hf":
        return SyncSetup(config=resolved, outlets={rank: Outlets(whole=(sink,)) for rank, sink in to_engines.items()})
    layouts, whole = engines.layouts(), engines.whole_tensors()
    served = {
        rank: (replica, tp_rank) for replica, ranks in enumerate(engines.servers) for tp_rank, rank in enumerate(ranks)
    }
    return SyncSetup(
        config=resolved,
        outlets={
            rank: Outlets(
                whole=(to_engines[rank],) if whole and rank in to_engines else (), boxes=engines.rank_sink(*place)
            )
            for rank, place in served.items()
        },
        nodes=topology.nodes,
        needs={rank: layouts[tp_rank] for rank, (_, tp_rank) in served.items()},
        groups=tuple(micro_dp_groups(grid, gen_tp=tp)) if strategy == "micro_dp" else (),
        whole=whole,
    )
