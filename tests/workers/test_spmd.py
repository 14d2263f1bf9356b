"""Worker groups without Ray, in ranks that run the same program."""

from __future__ import annotations

import pytest

from megarl.errors import DataError, WorkerError
from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import BROADCAST, Dispatch, from_output_rank
from megarl.workers.group import Group
from tests.megatron.ranks import run_ranks

EACH = Dispatch(lambda argument, grid: [argument + rank for rank in range(grid.size)], from_output_rank)


class Counter:
    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, number: int) -> int:
        if number < 0:
            raise ValueError("below zero")
        self.total += number
        return self.total

    def read(self, _: None) -> int:
        return self.total


def make_group(grid):
    import torch.distributed as dist

    from megarl.workers.spmd import SpmdWorld

    dist.init_process_group("gloo")
    world = SpmdWorld("cpu")
    group: Group[Counter] = world.group("counters", grid)
    return world, group


def check_call_order():
    world, group = make_group(RankGrid(pp=2))
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
    return world.run_on_rank0(lambda: world.rank) == 0


def test_calls_run_in_order_and_return_on_every_rank(tmp_path):
    assert run_ranks(check_call_order, 2, tmp_path)


def call_remote_on_replicas():
    _, group = make_group(RankGrid(dp=2))
    group.start(Counter, (0,)).result()
    return group.call_remote(Counter.add, 5, dispatch=EACH).fetch()


def test_every_replica_keeps_its_result(tmp_path):
    assert run_ranks(call_remote_on_replicas, 2, tmp_path) == (5, 6)


def fail_on_rank0():
    world, _ = make_group(RankGrid(dp=2))

    def fail():
        raise DataError(f"rank {world.rank} cannot read")

    with pytest.raises(DataError, match=r"^rank 0 cannot read$"):
        world.run_on_rank0(fail)
    return True


def test_error_on_rank_0_is_raised_on_all_ranks(tmp_path):
    assert run_ranks(fail_on_rank0, 2, tmp_path)


def fail_in_a_call():
    _, group = make_group(RankGrid(dp=2))
    group.start(Counter, (0,)).result()
    with pytest.raises(WorkerError) as error:
        group.call(Counter.add, -10, dispatch=EACH)
    return str(error.value)


def test_error_names_method_and_rank(tmp_path):
    text = run_ranks(fail_in_a_call, 2, tmp_path)
    assert text.startswith("counters.add failed on counters rank 0:\n")
    assert text.endswith("ValueError: below zero\n")
