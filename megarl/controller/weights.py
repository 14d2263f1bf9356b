"""Handing the policy's weights from the trainer to the engines.

On the trainer's slots, each trainer rank gathers what the engine rank beside it needs, and hands it over in shared
memory. Engines with slots of their own receive it themselves: the ranks of both sides are called at the same time, and
wait for each other (megarl.reshard.handover).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from megarl.config import RunConfig
from megarl.controller.engines import EngineGroup
from megarl.controller.servers import machines, number_machines
from megarl.controller.trainer_group import TrainerGroup
from megarl.errors import WeightSyncError
from megarl.megatron.work import Invitation, SyncSetup, total
from megarl.placement.grid import RankGrid
from megarl.placement.pool import SlotPool
from megarl.reshard.groups import micro_dp_groups
from megarl.reshard.handover import Handover
from megarl.reshard.placement import resolve_strategy
from megarl.reshard.process_groups import Meeting
from megarl.reshard.strategy import Outlets, SyncStats
from megarl.tracking.phases import PhaseTimer
from megarl.workers.group import Pending, RemoteCall

T = TypeVar("T")

ANSWER_SECONDS = 15.0
"""How much later than its ranks a side may say that `weight_sync.timeout_seconds` have passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """One push."""

    stats: SyncStats
    seconds: Mapping[str, float]
    """`open`: until the engines have stopped decoding; `transfer`; `commit`: until they decode again."""
    bytes_moved: int
    """Between trainer ranks and to engines."""


class WeightSync:
    """Engines take a new version only once all of it has arrived at all of them."""

    def __init__(self, config: RunConfig, trainer: TrainerGroup, engines: EngineGroup, pool: SlotPool) -> None:
        """`pool`: the trainer's."""
        self._trainer, self._engines = trainer, engines
        self._timeout_seconds = config.weight_sync.timeout_seconds
        self._setup = sync_setup(config, trainer.grid, engines, pool)
        self._backend = "nccl" if pool.device == "cuda" else "gloo"
        self._connect()
        self._connected = True
        """The ranks have connections for pushes; one that failed has broken them."""
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
                self._connect()
            self._connected = False
            stats = self._transfer()
            self._connected = True
        assert stats.bytes_sent == stats.bytes_received, f"{stats.bytes_sent} sent, {stats.bytes_received} received"
        with timer.phase("commit"):
            self._engines.call("end_weights", policy_version)
        self.policy_version = policy_version
        by_hand = 0 if self._invitation is not None else stats.bytes_delivered
        return PushReport(stats=stats, seconds=timer.totals, bytes_moved=stats.bytes_received + by_hand)

    def _connect(self) -> None:
        self._invitation = self._trainer.prepare_sync(self._setup)
        if self._invitation is not None:
            self._join(self._invitation)

    def _join(self, invitation: Invitation) -> None:
        """Have the ranks of both sides plan, and meet at the trainer's store, which is another one each time."""
        self._engines.prepare_receive(invitation.handover)
        meeting = Meeting(
            host=invitation.host,
            port=invitation.port,
            name="weights",
            size=invitation.handover.size,
            timeout_seconds=self._timeout_seconds,
            backend=self._backend,
        )
        self._both(invitation, self._engines.begin("join_trainer", meeting), self._trainer.begin_join(meeting))

    def _transfer(self) -> SyncStats:
        """What was counted; on both sides, where engines receive the weights themselves."""
        if self._invitation is None:
            return self._trainer.push_weights()
        receiving, sending = self._engines.begin("receive_weights"), self._trainer.begin_push()
        received, sent = self._both(self._invitation, receiving, sending)
        return total([sent, *chain.from_iterable(received)])

    def _both(self, invitation: Invitation, engines: RemoteCall[list[Any]], trainer: Pending[T]) -> tuple[list[Any], T]:
        try:
            return engines.beside(trainer).result(self._timeout_seconds + ANSWER_SECONDS)
        except WeightSyncError as e:
            raise WeightSyncError(f"{e} ({invitation.handover.legend})") from e


def sync_setup(config: RunConfig, grid: RankGrid, engines: EngineGroup, pool: SlotPool) -> SyncSetup:
    """How weights travel in this run: boxes to each engine rank from the rank beside it, if there is one.

    Whole tensors, which are all with `gather_hf` and otherwise those of which engines compute values of their own, go
    to each engine from the first of its servers.
    """
    if config.engines_apart:
        handover = _handover(config, engines, pool)
        return SyncSetup(config=config.weight_sync, outlets={}, handover=handover)
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


def _handover(config: RunConfig, engines: EngineGroup, pool: SlotPool) -> Handover:
    """What both sides plan from, but for what the trainer's ranks hold: they know that themselves."""
    slots = [*pool.slots, *(engines.pool.slots[slot] for ranks in engines.servers for slot in ranks)]
    return Handover(
        sources=(),
        needs=tuple(engines.layouts()),
        num_engines=len(engines.servers),
        nodes=number_machines(slots),
        bucket_bytes=config.weight_sync.bucket_bytes,
        whole=engines.whole_tensors(),
    )
