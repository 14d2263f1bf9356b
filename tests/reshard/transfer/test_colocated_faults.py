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
from megarl.reshard.transfer.process_groups import destroy_group, make_group, make_sync_group, open_store
from megarl.reshard.transfer.sink import Parameters
from megarl.reshard.transfer.transport import Transport
from tests.reshard import synthetic
from tests.reshard.rank_process import FaultyTensors, RankProcess, call, empty_parameters
from tests.reshard.transfer.test_executor import value

GRID = RankGrid(tp=4)
TIMEOUT, SLACK = 4.0, 1.5


class ColocatedMember:
    """A trainer rank and the parameters of the engine rank that it serves."""

    def __init__(self, rank, port, groups):
        self._rank, self._groups, self._sync_group, self._gather = rank, groups, None, None
        self._sources = synthetic.trainers(GRID)
        self._needs = synthetic.needs(strided_places(GRID, gen_tp=2), 1, 2)
        self._parameters = empty_parameters(self._needs[rank])
        store = dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=GRID.size)

    def connect(self):
        destroy_group(self._gather)
        destroy_group(self._sync_group)
        self._sync_group, self._gather = make_sync_group(TIMEOUT), make_group(self._rank, self._groups)

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
        transport = Transport(self._sync_group, timeout_seconds=TIMEOUT, is_exclusive=True)
        executor = BoxExecutor(self._rank, plan.rounds, plan.buffer_sizes, self._gather, transport)
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


@pytest.fixture(scope="module", params=["micro-DP groups gather", "any rank sends to any rank"])
def ranks(request):
    store = open_store("127.0.0.1")
    groups = micro_dp_groups(GRID, gen_tp=2) if request.param.startswith("micro") else []
    ranks = [RankProcess(ColocatedMember, rank, store.port, groups) for rank in range(GRID.size)]
    for rank in ranks:
        rank.wait_started()
    call(ranks, "connect")
    yield ranks
    for rank in ranks:
        rank.close()


def failing_sync(ranks, fault):
    for rank in ranks:
        rank.begin("sync", 2, fault)
    outcomes = {rank.rank: rank.result() for rank in ranks if rank.rank != fault[1]}
    partners = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    for rank, outcome in partners.items():
        assert re.match(rf"rank {rank}: round [1-9]\d* of the weights: ", outcome.error), outcome.error
    for outcome in outcomes.values():
        assert outcome.seconds <= TIMEOUT + SLACK
        assert outcome.buffers == 0
    assert any(re.search(rf"rank {fault[1]}\b", o.error.partition("weights: ")[2]) for o in partners.values())


def test_error_names_stalled_rank_and_next_sync_is_complete(ranks):
    assert call(ranks, "sync", 1) == [0] * GRID.size
    failing_sync(ranks, (signal.SIGSTOP, 1))
    ranks[1].signal(signal.SIGCONT)
    assert ranks[1].result().error.startswith("rank 1: round ")
    assert call(ranks, "check_default_group") == [[0, 1, 2, 3]] * GRID.size
    call(ranks, "connect")
    assert call(ranks, "sync", 3) == [0] * GRID.size


def test_error_names_dead_rank(ranks):
    """Kills a rank for good, so this test runs last."""
    failing_sync(ranks, (signal.SIGKILL, 1))
