"""Colocated sync between trainer ranks of one torch world, one of which fails in the middle."""

import re
import signal
from itertools import product

import pytest
import torch.distributed as dist

from benchmarks.reshard.nccl_order import NcclOrderTransport
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.reshard.layout.engine_ranks import micro_dp_groups, place_engines_strided
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.transfer.bucket import Parameters
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.process_groups import (
    destroy_group,
    make_group,
    make_sync_transport,
)
from tests.reshard import synthetic
from tests.reshard.rank_process import ABORT, FaultyTensors, Ranks, call, empty_parameters, held_tensors, wrong_elements
from tests.reshard.transfer.test_executor import value
from tests.time_limits import UNREACHED_SECONDS

GRID = RankGrid(tp=4)


class ColocatedMember:
    """A trainer rank and the parameters of the engine rank that it serves."""

    def __init__(self, rank, groups):
        self._rank, self._groups = rank, groups
        self._sync_group = self._gather = None
        self._sources = synthetic.trainers(GRID)
        self._needs = synthetic.needs(place_engines_strided(GRID, gen_tp=2))
        self._parameters = empty_parameters(self._needs[rank])

    def connect(self, transfer_group):
        if not dist.is_initialized():
            store = dist.TCPStore(transfer_group.host, transfer_group.port)
            dist.init_process_group("gloo", store=store, rank=self._rank, world_size=GRID.size)
        destroy_group(self._gather)
        destroy_group(self._sync_group)
        self._gather = make_group(self._rank, self._groups)
        make_transport = transfer_group.backend if callable(transfer_group.backend) else None
        self._sync_group, self._transport = make_sync_transport(UNREACHED_SECONDS, make_transport, transfer_group)

    def sync(self, number, fault=None, _=None):
        """Run one sync; return the number of wrong elements."""
        for tensor in self._parameters.values():
            tensor.fill_(float("nan"))
        held = held_tensors(self._sources[self._rank], value, number)
        if fault is not None and fault[1] == self._rank:
            held = FaultyTensors(held, fault[0])
        single = Topology.single(GRID.size)
        plan = cached_plan(self._sources, self._needs, single, self._rank, 16_384, groups=self._groups)
        executor = BoxExecutor(self._rank, plan.rounds, plan.buffer_sizes, self._gather, self._transport)
        with self._transport.syncing():
            executor.run(held, Parameters(self._parameters))
        return wrong_elements(self._needs[self._rank], self._parameters, value, number)

    def check_default_group(self):
        """Check that torch's default group still works."""
        numbers = [None] * GRID.size
        dist.all_gather_object(numbers, self._rank)
        return numbers


@pytest.fixture(scope="module", params=product(["gloo", NcclOrderTransport], ["micro-DP groups", "no groups"]), ids=str)
def ranks(request):
    backend, kind = request.param
    groups = micro_dp_groups(GRID, gen_tp=2) if kind == "micro-DP groups" else []
    with Ranks(backend, GRID.size, ColocatedMember, groups) as ranks:
        yield ranks


def failing_sync(ranks, fault):
    """Run a sync in which rank `fault[1]` is lost; the other ranks fail without leaks and name it."""
    outcomes = ranks.monitored_sync(2, fault)
    for rank, outcome in outcomes.items():
        assert outcome.error is None or re.match(rf"rank {rank}: round \d+ of the weights: ", outcome.error)
        assert outcome.buffers == 0
    errors = [outcome.error.partition("weights: ")[2] for outcome in outcomes.values() if outcome.error is not None]
    assert any(re.search(rf"rank {fault[1]}\b", error) for error in errors)
    return errors


def test_error_names_stalled_rank_and_next_sync_is_complete(ranks):
    assert ranks.sync(1) == [0] * GRID.size
    errors = failing_sync(ranks, (signal.SIGSTOP, 1))
    if ranks.backend == NcclOrderTransport:
        assert set(errors) == {f"the sync was aborted: rank 1 gave no sign of life for {ABORT:g} s"}
    ranks.ranks[1].signal(signal.SIGCONT)
    assert ranks.ranks[1].result().error.startswith("rank 1: round ")
    assert call(ranks.ranks, "check_default_group") == [[0, 1, 2, 3]] * GRID.size
    ranks.connect_all()
    assert ranks.sync(3) == [0] * GRID.size


@pytest.mark.last
def test_error_names_dead_rank(ranks):
    failing_sync(ranks, (signal.SIGKILL, 1))
