"""Groups of ranks that run one program."""

from __future__ import annotations

import pytest

from megarl.errors import DataError, WorkerError
from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import BROADCAST, Transfer, from_output
from megarl.workers.group import Group
from tests.megatron.ranks import run_ranks

EACH = Transfer(lambda argument, grid: [argument + rank for rank in range(grid.size)], from_output)


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


def call_in_order():
    world, group = make_group(RankGrid(pp=2))
    starting = group.start(Counter, (100,))
    first, second = group.begin(Counter.add, 1, via=EACH), group.begin(Counter.add, 10, via=EACH)
    assert second.result() == 100 + 2 + 11  # rank 1 answers
    assert first.result() == 102
    assert starting.result() is None
    group.begin(Counter.add, 1000, via=EACH)
    assert group.call(Counter.read, None, via=BROADCAST) == 1111
    assert group.keep(Counter.read, None, via=BROADCAST).fetch() == (1114,)
    assert group.put([world.rank]).fetch() == [world.rank]
    assert world.gather(world.rank * 2) == [0, 2]
    assert [world.any(flag) for flag in (False, world.rank == 1, world.rank == 0, True)] == [False, True, True, True]
    return world.on_first(lambda: world.rank) == 0


def test_calls_run_in_their_order_and_answer_on_every_rank(tmp_path):
    assert run_ranks(call_in_order, 2, tmp_path)


def replicas_keep():
    _, group = make_group(RankGrid(dp=2))
    group.start(Counter, (0,)).result()
    return group.keep(Counter.add, 5, via=EACH).fetch()


def test_every_replica_keeps_its_own(tmp_path):
    assert run_ranks(replicas_keep, 2, tmp_path) == (5, 6)


def fail_on_first():
    world, _ = make_group(RankGrid(dp=2))

    def fail():
        raise DataError(f"rank {world.rank} cannot read")

    with pytest.raises(DataError, match=r"^rank 0 cannot read$"):
        world.on_first(fail)
    return True


def test_an_error_of_the_first_rank_is_everyones(tmp_path):
    assert run_ranks(fail_on_first, 2, tmp_path)


def fail_in_a_call():
    _, group = make_group(RankGrid(dp=2))
    group.start(Counter, (0,)).result()
    with pytest.raises(WorkerError) as error:
        group.call(Counter.add, -10, via=EACH)
    return str(error.value)


def test_an_error_names_method_and_rank(tmp_path):
    text = run_ranks(fail_in_a_call, 2, tmp_path)
    assert text.startswith("counters.add failed on counters rank 0:\n")
    assert text.endswith("ValueError: below zero\n")
