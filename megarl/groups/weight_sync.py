"""Weight sync: pushes the policy's weights from the trainer to the engines.

Colocated engines: each trainer rank gathers what the engine rank on its slot needs, and passes it on in shared memory.
Disaggregated engines (slots of their own) receive the weights over the network: the ranks of both sides are called at
the same time and wait for each other (megarl.reshard.planning.disaggregated).

If an engine is lost during a push, it is restarted and the push is retried. An engine that is restarted between two
pushes receives the version that the others serve, while they continue to serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from megarl.config import RunConfig
from megarl.errors import MegarlError, WeightSyncError
from megarl.groups.engine_group import EngineGroup, EngineHandles, StartedEngine
from megarl.groups.engine_placement import node_indices, pool_topology
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.requests import RendezvousInfo, SyncSetup, sum_sync_stats
from megarl.placement.pool import SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.engine_ranks import resolve_strategy
from megarl.reshard.layout.micro_dp import micro_dp_groups
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.strategy import Sinks, SyncStats
from megarl.reshard.transfer.process_groups import TransferGroup
from megarl.tracking.phases import PhaseTimer
from megarl.workers.group import RemoteCall, WorkerFuture

E = TypeVar("E")
T = TypeVar("T")

REPORT_GRACE_SECONDS = 15.0
"""Time allowed, after `weight_sync.timeout_seconds`, for a side to report the timeout of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """Volume and timing of one push."""

    stats: SyncStats
    seconds: Mapping[str, float]
    """Seconds by phase. `open`: until the engines have stopped decoding; `transfer`; `commit`: until they resume."""
    bytes_moved: int
    """Bytes sent between trainer ranks and to engines."""


class WeightSync:
    """Pushes policy versions; engines switch to a version only after all ready engines have received all of it."""

    def __init__(self, config: RunConfig, trainer: TrainerGroup, engines: EngineGroup, pool: SlotPool) -> None:
        """`pool`: slots of the trainer."""
        self._config, self._trainer, self._engines, self._pool = config, trainer, engines, pool
        self._timeout_seconds = config.weight_sync.timeout_seconds
        self._backend = "nccl" if pool.device == "cuda" else "gloo"
        self._connected_engines: list[StartedEngine] | None = None
        """Engines that the trainer ranks are connected to; None after a failed push, which breaks the connections."""
        self.policy_version = -1
        """Version that the engines hold; -1 before the first push."""
        self._retry_on_engine_loss(lambda ready: self._connect(engines.select(ready)))
        engines.supervisor.resync = self.resync

    def push(self, policy_version: int) -> PushReport:
        """Push the trainer's current weights to all ready engines, as `policy_version`.

        Raises:
            WeightSyncError: the weights did not arrive completely; the engines refuse to serve until a push succeeds.
            WorkerError: a trainer rank died, or an engine was lost that must not be restarted.
        """

        def push(ready: Sequence[int]) -> PushReport:
            report = self._push(self._engines.select(ready), policy_version)
            self._engines.supervisor.mark_serving(ready)
            return report

        report = self._retry_on_engine_loss(push)
        self.policy_version = policy_version
        self._engines.supervisor.resync = self.resync
        return report

    def resync(self, replica: int) -> None:
        """Push the current version to a restarted engine, while the others continue to serve.

        If that engine is lost meanwhile, returns without an error: it will be restarted. Raises as `push` does.
        """
        if self.policy_version < 0:
            return  # the first push will include this engine
        supervisor = self._engines.supervisor
        while replica in supervisor.ready:  # retry if another engine caused the failure
            try:
                self._push(self._engines.select([replica]), self.policy_version)
                break
            except MegarlError as error:
                if not supervisor.attribute_failure(error):
                    raise
        if self._trainer.offload_config.is_enabled:
            self._trainer.offload()

    def _retry_on_engine_loss(self, work: Callable[[Sequence[int]], T]) -> T:
        """Return `work(ready replicas)`; retry it if it fails because an engine was lost."""
        supervisor = self._engines.supervisor
        while True:
            try:
                return work(supervisor.wait_ready())
            except MegarlError as error:
                if not supervisor.attribute_failure(error):
                    raise

    def _push(self, engines: EngineHandles, policy_version: int) -> PushReport:
        timer = PhaseTimer()
        with timer.phase("open"):
            engines.call("begin_weights")
        with timer.phase("transfer"):
            if self._connected_engines != engines.engines:
                self._connect(engines)
            self._connected_engines = None
            stats = self._transfer(engines)
            self._connected_engines = engines.engines
        assert stats.bytes_sent == stats.bytes_received, f"{stats.bytes_sent} sent, {stats.bytes_received} received"
        with timer.phase("commit"):
            engines.call("end_weights", policy_version)
        local_bytes = 0 if self._rendezvous_info is not None else stats.bytes_delivered
        return PushReport(stats=stats, seconds=timer.totals, bytes_moved=stats.bytes_received + local_bytes)

    def _connect(self, engines: EngineHandles) -> None:
        self._connected_engines = None
        setup = make_sync_setup(self._config, self._trainer.grid, engines, self._pool)
        self._rendezvous_info = self._trainer.prepare_sync(setup)
        if self._rendezvous_info is not None:
            self._connect_disaggregated(self._rendezvous_info, engines)
        self._connected_engines = engines.engines

    def _connect_disaggregated(self, rendezvous_info: RendezvousInfo, engines: EngineHandles) -> None:
        """Plan on both sides and connect their ranks through the trainer's store, which is a new one each time."""
        engines.prepare_receive(rendezvous_info.transfer_spec)
        transfer_group = TransferGroup(
            host=rendezvous_info.host,
            port=rendezvous_info.port,
            name="weights",
            size=rendezvous_info.transfer_spec.size,
            timeout_seconds=self._timeout_seconds,
            backend=self._backend,
        )
        self._wait_both(
            rendezvous_info, engines.begin("join_trainer", transfer_group), self._trainer.begin_connect(transfer_group)
        )

    def _transfer(self, engines: EngineHandles) -> SyncStats:
        """Transfer the weights; return the statistics of both sides."""
        if self._rendezvous_info is None:
            return self._trainer.push_weights()
        receiving, sending = engines.begin("receive_weights"), self._trainer.begin_push()
        received, sent = self._wait_both(self._rendezvous_info, receiving, sending)
        return sum_sync_stats([sent, *chain.from_iterable(received)])

    def _wait_both(
        self, rendezvous_info: RendezvousInfo, engines: RemoteCall[E], trainer: WorkerFuture[T]
    ) -> tuple[E, T]:
        try:
            return engines.joined_with(trainer).result(self._timeout_seconds + REPORT_GRACE_SECONDS)
        except WeightSyncError as e:
            raise WeightSyncError(f"{e} ({rendezvous_info.transfer_spec.rank_legend})") from e


def make_sync_setup(config: RunConfig, grid: RankGrid, engines: EngineHandles, pool: SlotPool) -> SyncSetup:
    """Return which trainer rank sends what to which engine rank.

    Colocated engine ranks receive boxes from the trainer rank on the same slot. Full tensors go to each engine from the
    first trainer rank on its slots: with `gather_hf` all tensors, otherwise those from which engines derive values.
    """
    if config.disaggregated:
        transfer_spec = _make_transfer_spec(config, engines, pool)
        return SyncSetup(config=config.weight_sync, sinks={}, transfer_spec=transfer_spec)
    tp, topology = config.rollout.tp, pool_topology(pool)
    strategy = resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp)
    resolved = config.weight_sync.model_copy(update={"strategy": strategy})
    engine_sinks = {ranks[0]: sink for ranks, sink in zip(engines.engine_slots, engines.sinks(), strict=True)}
    if strategy == "gather_hf":
        return SyncSetup(
            config=resolved, sinks={rank: Sinks(full_tensors=(sink,)) for rank, sink in engine_sinks.items()}
        )
    layouts, full_tensors = engines.layouts(), engines.full_tensors()
    rank_roles = {
        rank: (replica, tp_rank)
        for replica, ranks in enumerate(engines.engine_slots)
        for tp_rank, rank in enumerate(ranks)
    }
    return SyncSetup(
        config=resolved,
        sinks={
            rank: Sinks(
                full_tensors=(engine_sinks[rank],) if full_tensors and rank in engine_sinks else (),
                boxes=engines.rank_sink(*role),
            )
            for rank, role in rank_roles.items()
        },
        nodes=topology.nodes,
        needs={rank: layouts[tp_rank] for rank, (_, tp_rank) in rank_roles.items()},
        groups=tuple(micro_dp_groups(grid, gen_tp=tp)) if strategy == "micro_dp" else (),
        full_tensors=full_tensors,
    )


def _make_transfer_spec(config: RunConfig, engines: EngineHandles, pool: SlotPool) -> TransferSpec:
    """Return what both sides plan from, without `sources`: the trainer ranks add the layouts that they hold."""
    slots = [*pool.slots, *(engines.pool.slots[slot] for ranks in engines.engine_slots for slot in ranks)]
    return TransferSpec(
        sources=(),
        needs=tuple(engines.layouts()),
        num_engines=len(engines.engine_slots),
        nodes=node_indices(slots),
        bucket_bytes=config.weight_sync.bucket_bytes,
        full_tensors=engines.full_tensors(),
    )
