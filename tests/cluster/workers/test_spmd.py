"""Dispatch of arguments and results, and worker groups without Ray, in ranks that run the same program."""

import pytest
import torch.distributed as dist

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import BROADCAST, Dispatch, from_output_rank, from_rank0, to_all
from megarl.cluster.workers.spmd import SpmdWorld
from megarl.errors import DataError, WorkerError
from tests.errors import expect_error
from tests.megatron.ranks import run_ranks


def test_broadcast_sends_the_argument_to_all_and_returns_rank_0():
    grid = RankGrid(tp=2, dp=2)
    argument = object()
    assert BROADCAST.distribute(argument, grid) == to_all(argument, grid) == [argument] * 4
    assert BROADCAST.collect(["a", "b", "c", "d"], grid) == from_rank0(["a", "b", "c", "d"], grid) == "a"


def test_output_comes_from_the_last_stage():
    results = [f"rank {rank}" for rank in range(8)]
    assert from_output_rank(results, RankGrid(tp=2, dp=2, pp=2)) == "rank 4"
    assert from_output_rank(results, RankGrid(tp=2, pp=4)) == "rank 6"


EACH = Dispatch(lambda argument, grid: [argument + rank for rank in range(grid.size)], from_output_rank)


class Counter:
    def __init__(self, start):
        self.total = start

    def add(self, number):
        if number < 0:
            raise ValueError("below zero")
        self.total += number
        return self.total

    def read(self, _):
        return self.total


def check_groups():
    dist.init_process_group("gloo")
    world = SpmdWorld("cpu")
    check_call_order(world)
    replicas = world.group("replicas", RankGrid(dp=2))
    replicas.start(Counter, (0,)).result()
    assert replicas.call_remote(Counter.add, 5, dispatch=EACH).fetch() == (5, 6)  # every replica keeps its result

    def fail():
        raise DataError(f"rank {world.rank} cannot read")

    with expect_error(DataError, "0", "cannot"):
        world.run_on_rank0(fail)
    with pytest.raises(WorkerError) as error:
        replicas.call(Counter.add, -10, dispatch=EACH)
    return str(error.value)


def check_call_order(world):
    """Calls run in order and return on every rank."""
    group = world.group("counters", RankGrid(pp=2))
    starting = group.start(Counter, (100,))
    first, second = group.begin(Counter.add, 1, dispatch=EACH), group.begin(Counter.add, 10, dispatch=EACH)
    assert second.result() == 100 + 2 + 11  # from the output rank, rank 1
    assert first.result() == 102
    assert starting.result() is None
    group.begin(Counter.add, 1000, dispatch=EACH)
    assert group.call(Counter.read, None, dispatch=BROADCAST) == 1111
    assert group.call_remote(Counter.read, None, dispatch=BROADCAST).fetch() == (1114,)
    assert group.put([world.rank]).fetch() == [world.rank]
    assert world.gather(world.rank * 2) == [0, 2]
    assert [world.any(flag) for flag in (False, world.rank == 1, world.rank == 0, True)] == [False, True, True, True]
    assert world.run_on_rank0(lambda: world.rank) == 0


def test_calls_and_errors_are_the_same_on_all_ranks(tmp_path):
    text = run_ranks(check_groups, 2, tmp_path)
    assert text.startswith("replicas.add failed on replicas rank 0:\n")
    assert text.endswith("ValueError: below zero\n")
