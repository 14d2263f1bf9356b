"""Connections between trainer ranks and engines, over which weights are pushed.

A lost engine breaks colocated connections only on its own slots: the engine that replaces it connects there, and the
trainer ranks neither plan nor connect again. Of disaggregated engines, NCCL's communicators span both sides, so all
ranks connect again; ranks whose inputs have not changed keep their plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import override

import ray
from torch._C._distributed_c10d import TCPStore

from megarl.cluster.placement.pool import SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config import RunConfig
from megarl.errors import MegarlError, WeightSyncError
from megarl.megatron.requests import PushRequest, SyncSetup
from megarl.reshard.layout.engine_ranks import micro_dp_groups, resolve_strategy
from megarl.reshard.layout.layout import WeightNeeds
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.box_channel import BoxOffer
from megarl.reshard.transfer.commit_decision import open_store
from megarl.reshard.transfer.heartbeat import HeartbeatSpec
from megarl.reshard.transfer.process_groups import TransferGroup, abort_connect
from megarl.run.remote.engine_group import EngineGroup, EngineHandles, StartedEngine, node_indices, pool_topology
from megarl.run.remote.trainer_group import TrainerGroup

_GROUP_NAME = "weights"

REPORT_GRACE_SECONDS = 15.0
"""Time allowed, after `weight_sync.timeout_seconds`, for ranks to report their timeouts."""


class SyncConnections(ABC):
    """The connections of one arrangement of trainer and engines."""

    survives_engines: bool
    """Whether trainer ranks complete a push, and stay connected, if an engine is lost meanwhile."""

    def __init__(self, config: RunConfig, trainer: TrainerGroup, engines: EngineGroup, pool: SlotPool) -> None:
        self._config, self._trainer, self._engines, self._pool = config, trainer, engines, pool
        self.stores: list[TCPStore] = []
        """Stores for rendezvous, heartbeats and commits: the latest, after earlier ones until all ranks leave them."""
        self.setup: SyncSetup | None = None
        """What the connected ranks have planned from, another object after each connect; None: they are not connected.
        Its `heartbeat` is that of all connected ranks."""
        self.rank_legend = ""
        """What the rank numbers in errors mean; empty if they are trainer ranks."""
        self._connected: dict[int, StartedEngine] = {}
        """By replica, the engine that is connected with the trainer ranks."""

    @abstractmethod
    def connect(self, replicas: Sequence[int]) -> EngineHandles:
        """Connect the trainer ranks and these engines, as far as they are not connected; return the engines.

        Raises:
            WeightSyncError: a rank did not plan, or did not connect in time.
        """

    def request(self, engines: EngineHandles, delta: DeltaUpdate | None) -> PushRequest | None:
        """Return the request to push to these connected engines; `delta`: what it may leave out."""
        assert self.setup is not None
        pairs = list(zip(engines.engine_slots, engines.sinks(), strict=True)) if self.setup.senders else []
        sinks = {ranks[0]: (sink,) for ranks, sink in pairs}
        skipped = frozenset(self.setup.receivers).difference(*engines.engine_slots)
        return PushRequest(sinks=sinks, skipped=skipped, delta=delta) if sinks or skipped or delta else None

    def drop(self, *, trainer: bool) -> None:
        """Note that a push has failed: the engines have to connect again and, if `trainer`, so have all ranks."""
        self._connected.clear()
        if trainer:
            self.setup = None

    def _open_store(self) -> TCPStore:
        self.stores.append(open_store(ray.util.get_node_ip_address()))
        return self.stores[-1]


class ColocatedConnections(SyncConnections):
    """Connections between the trainer ranks, and of each with the engine rank on its slot."""

    survives_engines = True
    _offers: Mapping[int, BoxOffer]
    """By connected trainer rank, what the engine rank on its slot needs to receive its boxes."""

    @override
    def connect(self, replicas: Sequence[int]) -> EngineHandles:
        engines = self._engines.select(replicas)
        if self.setup is None:
            self.setup = self._connect_trainer(engines)
        found = dict(zip(replicas, engines.engines, strict=True))
        new = [replica for replica, engine in found.items() if self._connected.get(replica) != engine]
        if new and self.setup.receivers:
            handles = self._engines.select(new)
            offers = [([self._offers[rank] for rank in ranks],) for ranks in handles.engine_slots]
            handles.begin_each("prepare_boxes", offers).result(self._config.weight_sync.timeout_seconds)
        self._connected.update(found)
        return engines

    def _connect_trainer(self, engines: EngineHandles) -> SyncSetup:
        grid = self._trainer.grid
        setup = make_sync_setup(self._config, grid, self._engines.engine_slots, self._pool, engines.weight_needs)
        store = self._open_store()
        if setup.receivers:
            seconds = setup.config.abort_seconds
            setup = replace(setup, heartbeat=HeartbeatSpec(store.host, store.port, _GROUP_NAME, grid.size, seconds))
        self._connected.clear()
        self._offers = self._trainer.prepare_sync(setup).offers
        del self.stores[:-1]
        return setup


class DisaggregatedConnections(SyncConnections):
    """Connections of all trainer ranks and engine ranks with each other."""

    survives_engines = False

    @override
    def connect(self, replicas: Sequence[int]) -> EngineHandles:
        engines = self._engines.select(replicas)
        found = dict(zip(replicas, engines.engines, strict=True))
        if self._connected == found:
            return engines
        self.drop(trainer=True)
        config, store = self._config, self._open_store()
        needs = engines.weight_needs()
        spec = make_transfer_spec(config, engines.engine_slots, engines.pool, self._pool, needs)
        compared = () if config.weight_sync.verify is None else needs.layouts
        setup = SyncSetup(config=config.weight_sync, engine=compared, transfer_spec=spec)
        complete_spec = self._trainer.prepare_sync(setup).transfer_spec
        assert complete_spec is not None, "trainer ranks return a transfer spec if they are given one"
        self.rank_legend = complete_spec.rank_legend
        transfer_group = TransferGroup(
            host=store.host,
            port=store.port,
            name=_GROUP_NAME,
            size=complete_spec.size,
            timeout_seconds=config.weight_sync.timeout_seconds,
            backend="nccl" if self._pool.device == "cuda" else "gloo",
            abort_seconds=config.weight_sync.abort_seconds,
        )
        joining = engines.begin_join(complete_spec, transfer_group)
        both = joining.joined_with(self._trainer.begin_connect(transfer_group))
        try:
            both.result(transfer_group.timeout_seconds + REPORT_GRACE_SECONDS)
        except MegarlError as e:
            abort_connect(transfer_group, store, str(e))
            if isinstance(e, WeightSyncError):
                raise type(e)(f"{e} ({self.rank_legend})") from e
            raise
        del self.stores[:-1]
        self._connected, self.setup = found, replace(setup, heartbeat=transfer_group)
        return engines


def make_sync_setup(
    config: RunConfig,
    grid: RankGrid,
    engine_slots: Sequence[Sequence[int]],
    pool: SlotPool,
    find_needs: Callable[[], WeightNeeds],
) -> SyncSetup:
    """Return which trainer rank sends what to which colocated engine rank.

    Engine ranks receive boxes from the trainer rank on the same slot. With `gather_hf`, full tensors go to each engine
    from the first trainer rank on its slots.

    Args:
        engine_slots: by replica, the trainer rank on the slot of each of its ranks.
        pool: slots of the trainer.
        find_needs: returns what an engine needs; not called for `gather_hf` if weights are not to be compared.

    Raises:
        WeightSyncError: `find_needs` cannot tell, with advice.
    """
    tp, topology = config.rollout.tp, pool_topology(pool)
    strategy = resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp)
    resolved = config.weight_sync.model_copy(update={"strategy": strategy})
    if strategy == "gather_hf":
        try:
            engine = () if resolved.verify is None else find_needs().layouts
        except WeightSyncError as e:
            raise WeightSyncError(f"engines' weights cannot be compared: set weight_sync.verify: null ({e})") from e
        senders = tuple(sorted(ranks[0] for ranks in engine_slots))
        return SyncSetup(config=resolved, senders=senders, engine=engine)
    needs = find_needs()
    received = needs.received()
    roles = {
        rank: (replica, tp_rank) for replica, ranks in enumerate(engine_slots) for tp_rank, rank in enumerate(ranks)
    }
    return SyncSetup(
        config=resolved,
        receivers={rank: f"engine {replica} rank {tp_rank}" for rank, (replica, tp_rank) in roles.items()},
        nodes=topology.nodes,
        needs={rank: received[tp_rank] for rank, (_, tp_rank) in roles.items()},
        groups=tuple(micro_dp_groups(grid, gen_tp=tp)) if strategy == "micro_dp" else (),
        engine=() if resolved.verify is None else needs.layouts,
    )


def make_transfer_spec(
    config: RunConfig,
    engine_slots: Sequence[Sequence[int]],
    engine_pool: SlotPool,
    trainer_pool: SlotPool,
    needs: WeightNeeds,
) -> TransferSpec:
    """Return what both sides plan from, without `sources`: the trainer ranks add the layouts that they hold."""
    slots = [*trainer_pool.slots, *(engine_pool.slots[slot] for ranks in engine_slots for slot in ranks)]
    return TransferSpec(
        sources=(),
        needs=needs.received(),
        num_engines=len(engine_slots),
        nodes=node_indices(slots),
        bucket_bytes=config.weight_sync.bucket_bytes,
    )
