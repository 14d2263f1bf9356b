"""Handing the policy's weights from the trainer to the engines.

On the trainer's slots, each trainer rank gathers what the engine rank beside it needs, and hands it over in shared
memory. Engines with slots of their own receive it themselves: the ranks of both sides are called at the same time, and
wait for each other (megarl.reshard.planning.disaggregated).

An engine that is lost during a push is started anew, and the push is made again. One that comes back between two
pushes is given the version that the others serve, while they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from megarl.config import RunConfig
from megarl.errors import MegarlError, WeightSyncError
from megarl.groups.engine_group import EngineGroup, Engines, StartedEngine
from megarl.groups.engine_placement import machines, number_machines
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.requests import Invitation, SyncSetup, total
from megarl.placement.pool import SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.engine_ranks import resolve_strategy
from megarl.reshard.layout.micro_dp import micro_dp_groups
from megarl.reshard.planning.disaggregated import Handover
from megarl.reshard.planning.strategy import Outlets, SyncStats
from megarl.reshard.transfer.process_groups import Meeting
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
    """Engines take a new version only once all of it has arrived at all of them that are up."""

    def __init__(self, config: RunConfig, trainer: TrainerGroup, engines: EngineGroup, pool: SlotPool) -> None:
        """`pool`: the trainer's."""
        self._config, self._trainer, self._engines, self._pool = config, trainer, engines, pool
        self._timeout_seconds = config.weight_sync.timeout_seconds
        self._backend = "nccl" if pool.device == "cuda" else "gloo"
        self._connected: list[StartedEngine] | None = None
        """The engines for which the ranks have connections; a push that failed has broken them."""
        self.policy_version = -1
        """What the engines hold; -1 before the first push."""
        self._through_losses(lambda up: self._connect(engines.only(up)))
        engines.supervision.restore = self.restore

    def push(self, policy_version: int) -> PushReport:
        """Give the engines the trainer's current weights, as `policy_version`.

        Raises:
            WeightSyncError: they did not arrive whole; the engines refuse to serve until a push succeeds.
            WorkerError: a trainer rank died, or an engine was lost that may not be restarted.
        """

        def push(up: Sequence[int]) -> PushReport:
            report = self._push(self._engines.only(up), policy_version)
            self._engines.supervision.served(up)
            return report

        report = self._through_losses(push)
        self.policy_version = policy_version
        self._engines.supervision.restore = self.restore
        return report

    def restore(self, replica: int) -> None:
        """Give an engine that was started anew what the others serve, which go on meanwhile.

        One that is lost meanwhile is no error here: it is started anew once more. Raises as `push` does.
        """
        if self.policy_version < 0:
            return  # the first push is yet to come
        supervision = self._engines.supervision
        while replica in supervision.up:  # or it would serve without them, where another one was to blame
            try:
                self._push(self._engines.only([replica]), self.policy_version)
                break
            except MegarlError as error:
                if not supervision.blame(error):
                    raise
        if self._trainer.offloaded.anything:
            self._trainer.offload()

    def _through_losses(self, work: Callable[[Sequence[int]], T]) -> T:
        """What `work` returns of all engines that are up; it is done again where one was lost meanwhile."""
        supervision = self._engines.supervision
        while True:
            try:
                return work(supervision.wait_up())
            except MegarlError as error:
                if not supervision.blame(error):
                    raise

    def _push(self, engines: Engines, policy_version: int) -> PushReport:
        timer = PhaseTimer()
        with timer.phase("open"):
            engines.call("begin_weights")
        with timer.phase("transfer"):
            if self._connected != engines.engines:
                self._connect(engines)
            self._connected = None
            stats = self._transfer(engines)
            self._connected = engines.engines
        assert stats.bytes_sent == stats.bytes_received, f"{stats.bytes_sent} sent, {stats.bytes_received} received"
        with timer.phase("commit"):
            engines.call("end_weights", policy_version)
        by_hand = 0 if self._invitation is not None else stats.bytes_delivered
        return PushReport(stats=stats, seconds=timer.totals, bytes_moved=stats.bytes_received + by_hand)

    def _connect(self, engines: Engines) -> None:
        self._connected = None
        setup = sync_setup(self._config, self._trainer.grid, engines, self._pool)
        self._invitation = self._trainer.prepare_sync(setup)
        if self._invitation is not None:
            self._join(self._invitation, engines)
        self._connected = engines.engines

    def _join(self, invitation: Invitation, engines: Engines) -> None:
        """Have the ranks of both sides plan, and meet at the trainer's store, which is another one each time."""
        engines.prepare_receive(invitation.handover)
        meeting = Meeting(
            host=invitation.host,
            port=invitation.port,
            name="weights",
            size=invitation.handover.size,
            timeout_seconds=self._timeout_seconds,
            backend=self._backend,
        )
        self._both(invitation, engines.begin("join_trainer", meeting), self._trainer.begin_join(meeting))

    def _transfer(self, engines: Engines) -> SyncStats:
        """What was counted; on both sides, where engines receive the weights themselves."""
        if self._invitation is None:
            return self._trainer.push_weights()
        receiving, sending = engines.begin("receive_weights"), self._trainer.begin_push()
        received, sent = self._both(self._invitation, receiving, sending)
        return total([sent, *chain.from_iterable(received)])

    def _both(self, invitation: Invitation, engines: RemoteCall[list[Any]], trainer: Pending[T]) -> tuple[list[Any], T]:
        try:
            return engines.beside(trainer).result(self._timeout_seconds + ANSWER_SECONDS)
        except WeightSyncError as e:
            raise WeightSyncError(f"{e} ({invitation.handover.legend})") from e


def sync_setup(config: RunConfig, grid: RankGrid, engines: Engines, pool: SlotPool) -> SyncSetup:
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


def _handover(config: RunConfig, engines: Engines, pool: SlotPool) -> Handover:
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
