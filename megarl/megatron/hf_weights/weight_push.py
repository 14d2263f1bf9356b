"""Handing this rank's weights to engines through a strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.megatron.modeling.megatron_model import ModelRank
from megarl.megatron.requests import Invitation, SyncSetup
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.micro_dp import Cells, replica_cells
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.disaggregated import HandoverRank
from megarl.reshard.planning.strategy import Outlets, Strategy, SyncContext, SyncStats
from megarl.reshard.strategies.make_strategy import make_strategy
from megarl.reshard.transfer.process_groups import Meeting, open_store


class WeightPusher:
    """One rank's part of every push; made on all ranks together."""

    def __init__(self, model: ModelRank, setup: SyncSetup) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        layouts: list[WeightLayout] = [model.layout] * world
        dist.all_gather_object(layouts, model.layout)
        self._model = model
        self._outlets = setup.outlets.get(rank, Outlets())
        self.invitation: Invitation | None = None
        """To engines that receive the weights themselves; on rank 0."""
        self.strategy: Strategy
        if setup.handover is None:
            copies = replica_cells(_grid(model.groups, world))
            self.strategy = make_strategy(setup.config, _context(setup, rank, layouts, copies))
            return
        distinct: dict[WeightLayout, WeightLayout] = {}  # engines are sent each once
        handover = replace(setup.handover, sources=[distinct.setdefault(layout, layout) for layout in layouts])
        self.strategy = HandoverRank(handover, rank)
        if rank == 0:
            host = os.environ["MASTER_ADDR"]  # of this very machine
            self._store = open_store(host)
            self.invitation = Invitation(handover=handover, host=host, port=self._store.port)

    def join(self, meeting: Meeting) -> None:
        """Connect with the other ranks and with the engines' ranks, all of which join at the same time.

        Raises:
            WeightSyncError: another rank did not join in time.
        """
        assert isinstance(self.strategy, HandoverRank), "there are no engines to join"
        self.strategy.join(meeting)

    def push(self) -> SyncStats:
        """Deliver the current weights.

        Returns:
            What this rank counted: a collective that adds them up would wait for ranks that have failed.
        """
        with torch.no_grad():
            return self.strategy.push(self._model.tensors(), self._outlets)

    def close(self) -> None:
        """Free the buffers."""
        self.strategy.close()


def _context(
    setup: SyncSetup, rank: int, layouts: Sequence[WeightLayout], copies: Sequence[Sequence[Cells]]
) -> SyncContext:
    return SyncContext(
        rank=rank,
        sources=layouts,
        topology=Topology(setup.nodes or (0,) * len(layouts)),
        senders=sorted(rank for rank, outlets in setup.outlets.items() if outlets.whole),
        needs=setup.needs,
        groups=setup.groups,
        whole=setup.whole,
        copies=copies,
    )


def _grid(groups: ProcessGroupCollection, world: int) -> RankGrid:
    tp, cp, pp = groups.tp.size(), groups.cp.size(), groups.pp.size()
    dp = world // (tp * cp * pp)
    return RankGrid(tp=tp, cp=cp, dp=dp, pp=pp, ep=groups.ep.size(), etp=groups.expt_tp.size())
