"""Worker groups and shells, with workers that do next to nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util import remove_placement_group

from megarl.config.placement import PlacementConfig
from megarl.errors import RewardError, WorkerError
from megarl.placement.grid import RankGrid
from megarl.placement.pool import reserve
from megarl.workers.failure import wait_all
from megarl.workers.group import WorkerGroup
from megarl.workers.payload import LocalPayload, StoredPayload
from megarl.workers.shell import AsyncShell
from megarl.workers.transfers import BROADCAST, Transfer
from tests.end_to_end.launched import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


class Worker:
    def __init__(self, greeting: str) -> None:
        self.greeting, self.rank = greeting, int(os.environ["RANK"])

    def where(self, _: Any) -> Any:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FLAG")
        return self.greeting, *(os.environ[name] for name in names)

    def fail(self, argument: tuple[int, str]) -> Any:
        """On one rank; the others wait for it, as they do in a collective."""
        rank, how = argument
        if self.rank != rank:
            time.sleep(60)
        match how:
            case "ValueError":
                raise ValueError("of no use")
            case "RewardError":
                raise RewardError("a reward of nothing")
            case "SIGKILL":
                sys.stderr.write("its last words\n")
                os.kill(os.getpid(), signal.SIGKILL)
        return None


EACH: Transfer[Any, Any] = Transfer(lambda argument, grid: [argument] * grid.size, lambda results, _: list(results))


@pytest.fixture
def group() -> Iterator[WorkerGroup[Worker]]:
    pool = reserve(PlacementConfig(slots_per_node=2))
    group: WorkerGroup[Worker] = WorkerGroup("workers", pool, RankGrid(dp=2), {"FLAG": "flag"})
    group.start(Worker, ("hello",)).result(60)
    yield group
    group.stop()
    remove_placement_group(pool.group)


def test_every_rank_knows_its_place(group: WorkerGroup[Worker]) -> None:
    first, second = group.call(Worker.where, None, via=EACH)
    greeting, rank, world, local, address, port, flag = first
    assert (greeting, rank, world, local, flag) == ("hello", "0", "2", "0", "flag")
    assert second == (greeting, "1", world, local, address, port, flag)
    assert int(port) > 0
    assert group.call(Worker.where, None, via=BROADCAST) == first


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_rank_does_not_wait_for_the_others(group: WorkerGroup[Worker], rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"(?s)^workers\.fail failed on workers rank {rank}:\n.*ValueError: of no use"
    ):
        group.call(Worker.fail, (rank, "ValueError"), via=BROADCAST)
    assert time.monotonic() - started < 30


def test_an_error_of_ours_arrives_as_it_was_raised(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(RewardError, match=r"^a reward of nothing$"):
        group.call(Worker.fail, (1, "RewardError"), via=BROADCAST)


def test_a_killed_rank_is_named_and_its_last_words_are_shown(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError) as error:
        group.call(Worker.fail, (1, "SIGKILL"), via=BROADCAST)
    text = str(error.value)
    assert text.startswith("workers.fail: workers rank 1 died. ")
    assert re.search(r"\nthe end of \S+\.err:\n(.*\n)*its last words$", text)


def test_a_late_rank_is_named(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError, match=r"^workers\.fail: no answer within 0\.2 s from workers rank 0$"):
        group.call(Worker.fail, (1, "nothing"), via=BROADCAST, timeout=0.2)


class Slow:
    """A worker whose making and whose work take long; writes down what becomes of it."""

    def __init__(self, log: str) -> None:
        self.log = log

    @classmethod
    async def make(cls, log: str, seconds: float) -> Slow:
        slow = cls(log)
        slow.note("begun")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            slow.note("given up")
            raise
        return slow

    def note(self, text: str) -> None:
        with open(self.log, "a") as file:
            file.write(text + "\n")

    async def work(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def shutdown(self) -> None:
        self.note("shut down")


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = ray.remote(AsyncShell).options(num_cpus=0, max_concurrency=100).remote({"FLAG": "flag"})
    yield shell
    ray.kill(shell)


def test_calls_of_an_async_shell_run_side_by_side(shell: Any, tmp_path: Any) -> None:
    ray.get(shell.build.remote(Slow.make, (str(tmp_path / "log"), 0.0), {}), timeout=60)
    started = time.monotonic()
    refs = [shell.invoke.remote("work", 0.5) for _ in range(20)]
    assert wait_all(refs, what="work", names={}) == [0.5] * 20
    assert time.monotonic() - started < 5


def test_a_built_worker_is_shut_down_also_while_it_works(shell: Any, tmp_path: Any) -> None:
    ray.get(shell.build.remote(Slow.make, (str(tmp_path / "log"), 0.0), {}), timeout=60)
    shell.invoke.remote("work", 60.0)
    ray.get(shell.stop.remote(), timeout=10)
    assert (tmp_path / "log").read_text() == "begun\nshut down\n"


def test_a_worker_that_is_being_built_is_given_up(shell: Any, tmp_path: Any) -> None:
    building = shell.build.remote(Slow.make, (str(tmp_path / "log"), 60.0), {})
    log = tmp_path / "log"
    assert wait_until(log.exists, 60)
    assert not ray.wait([building], timeout=0)[0]
    ray.get(shell.stop.remote(), timeout=10)
    assert log.read_text() == "begun\ngiven up\n"
    assert ray.wait([building], timeout=5)[0]


def test_a_shell_without_a_worker_has_nothing_to_stop(shell: Any) -> None:
    ray.get(shell.stop.remote(), timeout=60)


def test_payloads() -> None:
    assert LocalPayload([1, 2]).fetch() == [1, 2]
    assert StoredPayload(ray.put([1, 2])).fetch() == [1, 2]
