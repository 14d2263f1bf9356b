"""Colocated sync between trainer ranks of one torch world, one of which fails in the middle."""

import re
import signal

import pytest
import torch.distributed as dist

from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import slices
from megarl.reshard.layout.micro_dp import micro_dp_groups, strided_places
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.heartbeat import HeartbeatSpec, SyncMonitor
from megarl.reshard.transfer.process_groups import (
    NCCL_ORDER,
    destroy_group,
    make_group,
    make_sync_group,
    make_sync_transport,
)
from megarl.reshard.transfer.sink import Parameters
from megarl.reshard.transfer.sync_store import open_store
from tests.reshard import synthetic
from tests.reshard.rank_process import FaultyTensors, RankProcess, call, empty_parameters
from tests.reshard.transfer.test_executor import value

GRID = RankGrid(tp=4)
TIMEOUT, ABORT, SLACK = 120.0, 4.0, 40.0


class ColocatedMember:
    """A trainer rank and the parameters of the engine rank that it serves."""

    def __init__(self, rank, port, groups, backend):
        self._rank, self._groups, self._backend = rank, groups, backend
        self._sync_group = self._gather = None
        self._sources = synthetic.trainers(GRID)
        self._needs = synthetic.needs(strided_places(GRID, gen_tp=2), 1, 2)
        self._parameters = empty_parameters(self._needs[rank])
        store = dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=GRID.size)

    def connect(self, heartbeat):
        destroy_group(self._gather)
        destroy_group(self._sync_group)
        self._sync_group, self._gather = make_sync_group(TIMEOUT), make_group(self._rank, self._groups)
        self._transport = make_sync_transport(self._sync_group, TIMEOUT, self._backend, heartbeat)

    def sync(self, number, fault=None):
        """Run one sync; return the number of wrong elements."""
        for tensor in self._parameters.values():
            tensor.fill_(float("nan"))
        held = {p.local: value(p.tensor, number)[slices(p.box)].clone() for p in self._sources[self._rank].pieces}
        if fault is not None and fault[1] == self._rank:
            held = FaultyTensors(held, fault[0])
        plan = cached_plan(
            self._sources, self._needs, Topology.single(GRID.size), self._rank, 16_384, groups=self._groups
        )
        executor = BoxExecutor(self._rank, plan.rounds, plan.buffer_sizes, self._gather, self._transport)
        with self._transport.syncing():
            executor.run(held, Parameters(self._parameters))
        return sum(
            int((self._parameters[p.local][slices(p.local_box)] != value(p.tensor, number)[slices(p.box)]).sum())
            for p in self._needs[self._rank].pieces
        )

    def check_default_group(self):
        """Check that torch's default group still works."""
        numbers = [None] * GRID.size
        dist.all_gather_object(numbers, self._rank)
        return numbers


class Ranks(list):
    """The processes of all ranks, and the store of their heartbeats."""

    def __init__(self, groups, backend):
        self.store, self._num_connects = open_store("127.0.0.1"), 0
        super().__init__(
            RankProcess(ColocatedMember, rank, self.store.port, groups, backend) for rank in range(GRID.size)
        )
        for rank in self:
            rank.wait_started()

    def connect(self):
        self._num_connects += 1
        name = f"sync {self._num_connects}"
        self.heartbeat = HeartbeatSpec("127.0.0.1", self.store.port, name, GRID.size, ABORT)
        call(self, "connect", self.heartbeat)


@pytest.fixture(scope="module", params=["gloo", NCCL_ORDER])
def backend(request):
    return request.param


@pytest.fixture(scope="module", params=["micro-DP groups gather", "any rank sends to any rank"])
def ranks(request, backend):
    ranks = Ranks(micro_dp_groups(GRID, gen_tp=2) if request.param.startswith("micro") else [], backend)
    ranks.connect()
    yield ranks
    for rank in ranks:
        rank.close()


def failing_sync(ranks, fault):
    """Run a sync in which rank `fault[1]` is lost; every other rank fails soon and names it alone."""
    with SyncMonitor(ranks.heartbeat):
        for rank in ranks:
            rank.begin("sync", 2, fault)
        outcomes = {rank.rank: rank.result() for rank in ranks if rank.rank != fault[1]}
    for rank, outcome in outcomes.items():
        assert outcome.error is None or re.match(rf"rank {rank}: round [1-9]\d* of the weights: ", outcome.error)
        assert outcome.seconds <= ABORT + SLACK
        assert outcome.buffers == 0
    errors = [outcome.error.partition("weights: ")[2] for outcome in outcomes.values() if outcome.error is not None]
    assert any(re.search(rf"rank {fault[1]}\b", error) for error in errors)
    return errors


def test_error_names_stalled_rank_and_next_sync_is_complete(ranks, backend):
    assert call(ranks, "sync", 1) == [0] * GRID.size
    errors = failing_sync(ranks, (signal.SIGSTOP, 1))
    if backend == NCCL_ORDER:
        assert set(errors) == {f"the sync was aborted: rank 1 gave no sign of life for {ABORT:g} s"}
    ranks[1].signal(signal.SIGCONT)
    assert ranks[1].result().error.startswith("rank 1: round ")
    assert call(ranks, "check_default_group") == [[0, 1, 2, 3]] * GRID.size
    ranks.connect()
    assert call(ranks, "sync", 3) == [0] * GRID.size


def test_error_names_dead_rank(ranks):
    """Kills a rank for good, so this test runs last."""
    failing_sync(ranks, (signal.SIGKILL, 1))
