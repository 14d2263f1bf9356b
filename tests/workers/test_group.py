"""Worker groups and shells, with workers that do next to nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import ray
from ray.util import remove_placement_group

from megarl.config.placement import PlacementConfig
from megarl.errors import LostRankError, MegarlError, RewardError, WeightSyncError, WorkerError
from megarl.placement.pool import Slot, SlotPool, reserve
from megarl.placement.rank_grid import RankGrid
from megarl.supervision.phase_watchdog import PhaseWatch
from megarl.workers.dispatch import BROADCAST, Transfer
from megarl.workers.failures import wait_all
from megarl.workers.group import WorkerGroup, WorkerProcesses
from megarl.workers.payload import LocalPayload, Payload, StoredPayload
from megarl.workers.stack_collector import collect_stacks
from megarl.workers.worker_host import AsyncShell
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

    def fail_each(self, how: tuple[str, str]) -> Any:
        """The second rank later than the first."""
        time.sleep(0.5 * self.rank)
        match how[self.rank]:
            case "LostRankError":
                raise LostRankError("lost the connection")
            case "WeightSyncError":
                raise WeightSyncError("the boxes are wrong")
            case "ValueError":
                raise ValueError("of no use")
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stall":
                time.sleep(60)
        return self.rank

    def meet(self, seconds: float) -> None:
        """One rank waits so long, and the other works."""
        ends = time.thread_time() + seconds
        if self.rank == 0:
            time.sleep(seconds)
        while self.rank == 1 and time.thread_time() < ends:
            pass


EACH: Transfer[Any, Any] = Transfer(lambda argument, grid: [argument] * grid.size, lambda results, _: list(results))


class Opposite:
    """Another worker in the same process."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])

    def number(self, scale: int) -> np.ndarray:
        if scale < 0 and self.rank == 1:
            raise ValueError("below zero")
        return np.full(100_000, scale * (self.rank + 1))

    def add_up(self, payload: Payload[tuple[np.ndarray, ...]]) -> int:
        return sum(int(part.sum()) for part in payload.fetch())


@pytest.fixture
def processes() -> Iterator[WorkerProcesses]:
    pool = reserve(PlacementConfig(slots_per_node=2))
    processes = WorkerProcesses("worker", pool, {"FLAG": "flag"})
    yield processes
    processes.stop()
    remove_placement_group(pool.group)


@pytest.fixture
def group(processes: WorkerProcesses) -> WorkerGroup[Worker]:
    group: WorkerGroup[Worker] = WorkerGroup("workers", processes, RankGrid(dp=2))
    group.start(Worker, ("hello",)).result(60)
    return group


def test_every_rank_knows_its_place(group: WorkerGroup[Worker]) -> None:
    first, second = group.call(Worker.where, None, via=EACH)
    greeting, rank, world, local, address, port, flag = first
    assert (greeting, rank, world, local, flag) == ("hello", "0", "2", "0", "flag")
    assert second == (greeting, "1", world, local, address, port, flag)
    assert int(port) > 0
    assert group.call(Worker.where, None, via=BROADCAST) == first


def test_roles_share_processes_and_hand_each_other_what_stays_there(
    group: WorkerGroup[Worker], processes: WorkerProcesses
) -> None:
    (_, *place), _ = group.call(Worker.where, None, via=EACH)
    others: WorkerGroup[Opposite] = WorkerGroup("others", processes, RankGrid(dp=2))
    others.start(Opposite, ()).result(60)
    again: WorkerGroup[Worker] = WorkerGroup("again", processes, RankGrid(tp=2))
    again.start(Worker, ("goodbye",)).result(60)
    assert again.call(Worker.where, None, via=BROADCAST) == ("goodbye", *place)
    assert group.call(Worker.where, None, via=BROADCAST) == ("hello", *place)
    kept = others.keep(Opposite.number, 10, via=BROADCAST)
    assert others.call(Opposite.add_up, kept, via=EACH) == [3_000_000, 3_000_000]
    assert [part[0] for part in kept.fetch()] == [10, 20]


def test_of_a_replica_its_answering_rank_keeps(processes: WorkerProcesses) -> None:
    staged: WorkerGroup[Opposite] = WorkerGroup("staged", processes, RankGrid(pp=2))
    staged.start(Opposite, ()).result(60)
    assert [part[0] for part in staged.keep(Opposite.number, 1, via=BROADCAST).fetch()] == [2]


def test_results_that_stay_do_not_come_here(processes: WorkerProcesses) -> None:
    others: WorkerGroup[Opposite] = WorkerGroup("others", processes, RankGrid(dp=2))
    others.start(Opposite, ()).result(60)
    with pytest.raises(WorkerError, match=r"(?s)^others\.number failed on others rank 1:\n.*ValueError: below zero"):
        others.keep(Opposite.number, -1, via=BROADCAST)
    with patch.object(ray, "get", wraps=ray.get) as get:
        kept = others.keep(Opposite.number, 1, via=BROADCAST)
    got = [ref for call in get.call_args_list for ref in np.atleast_1d(call.args[0])]
    assert got
    assert not set(got) & set(kept.refs)


def test_a_part_of_a_pool_has_its_slots_in_order() -> None:
    slots = tuple(Slot(bundle=i, cpus=1.0, gpus=0.0, node="n", gpu_id=None) for i in range(4))
    part = SlotPool(None, slots, "cpu").part([3, 1])
    assert [slot.bundle for slot in part.slots] == [3, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_rank_does_not_wait_for_the_others(group: WorkerGroup[Worker], rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"(?s)^workers\.fail failed on workers rank {rank}:\n.*ValueError: of no use"
    ):
        group.call(Worker.fail, (rank, "ValueError"), via=BROADCAST)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (("LostRankError", "WeightSyncError"), "^the boxes are wrong$"),
        (("WeightSyncError", "LostRankError"), "^the boxes are wrong$"),
        (
            ("LostRankError", "ValueError"),
            r"(?s)^workers\.fail_each failed on workers rank 1:\n.*ValueError: of no use",
        ),
        (("WeightSyncError", "SIGKILL"), r"^workers\.fail_each: workers rank 1 died\. "),
        (("LostRankError", "nothing"), "^lost the connection$"),
        (("WeightSyncError", "stall"), "^the boxes are wrong; nothing was heard of workers rank 1$"),
    ],
)
def test_of_a_sync_that_failed_the_cause_is_told(group: WorkerGroup[Worker], how: tuple[str, str], says: str) -> None:
    with pytest.raises(MegarlError, match=says):
        group.call(Worker.fail_each, how, via=BROADCAST)


def test_calls_beside_each_other_are_waited_for_as_one(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    others: WorkerGroup[Opposite] = WorkerGroup("others", processes, RankGrid(dp=2))
    others.start(Opposite, ()).result(60)
    first, second = group.begin(Worker.fail_each, ("", ""), via=EACH), others.begin(Opposite.number, 3, via=EACH)
    ranks, numbers = first.beside(second).result(30)
    assert (ranks, [part[0] for part in numbers]) == ([0, 1], [3, 6])
    first, second = group.begin(Worker.fail_each, ("", ""), via=EACH), others.begin(Opposite.number, -1, via=EACH)
    with pytest.raises(WorkerError, match=r"(?s)^workers\.fail_each beside others\.number failed on others rank 1:\n"):
        first.beside(second).result(30)


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


def test_a_stopped_rank_is_named_and_where_every_process_hangs(
    group: WorkerGroup[Worker], processes: WorkerProcesses, tmp_path: Path
) -> None:
    places = processes.places()
    assert list(places) == ["worker rank 0", "worker rank 1"]
    one = places["worker rank 1"]
    here = ray.get_runtime_context().get_node_id()
    assert {place.node_id for place in places.values()} == {here}
    said: list[str] = []
    watch = PhaseWatch(2.0, said.append, lambda: collect_stacks(places), tmp_path)
    os.kill(one.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(WorkerError) as error, watch.phase(12, "train"):
            group.call(Worker.meet, 0.1, via=BROADCAST)
        assert time.monotonic() - began < 25
        file = tmp_path / "stacks" / "step-000012-train.txt"
        says = f"train of step 12 took longer than 2 s; no answer from workers rank 1; stacks: {file}"
        assert str(error.value) == said[-1] == says
        text = file.read_text()
        assert re.search(rf"^worker rank 1 \(pid {one.pid} on {one.host}\): stopped, in \w+", text, re.MULTILINE)
        sections = [section for section in text.split("\n== ") if section.startswith("worker rank ")]
        assert [section.split(" (")[0] for section in sections] == list(places)
        assert all('"MainThread"\n' in section for section in sections)
    finally:
        os.kill(one.pid, signal.SIGCONT)
    assert group.call(Worker.where, None, via=EACH)[1][1] == "1"


def test_what_a_node_that_is_gone_cannot_tell_is_said(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    first = processes.places()["worker rank 0"]
    places = {"worker rank 0": first, "engine 7": replace(first, node_id="ab" * 28, host="n9")}
    text = collect_stacks(places, timeout=10.0)
    assert "\nn9: nothing about engine 7: " in text
    assert f"== worker rank 0 (pid {first.pid}" in text


def test_processes_know_what_their_ranks_worked(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    processes.take_calls()
    group.call(Worker.meet, 0.3, via=BROADCAST)
    idle, busy = processes.take_calls()
    assert [(record.role, record.method) for record in idle + busy] == [("workers", "meet")] * 2
    assert idle[0].worked < 0.1 < 0.29 < idle[0].seconds
    assert busy[0].worked > 0.25
    assert processes.take_calls() == [[], []]


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
    ray.get(shell.build.remote(Slow.make, (str(tmp_path / "log"), 0.0), {}, time.time()), timeout=60)
    started = time.monotonic()
    refs = [shell.invoke.remote("work", 0.5) for _ in range(20)]
    assert wait_all(refs, what="work", names={}) == [0.5] * 20
    assert time.monotonic() - started < 5


def test_a_built_worker_is_shut_down_also_while_it_works(shell: Any, tmp_path: Any) -> None:
    ray.get(shell.build.remote(Slow.make, (str(tmp_path / "log"), 0.0), {}, time.time()), timeout=60)
    shell.invoke.remote("work", 60.0)
    ray.get(shell.stop.remote(), timeout=10)
    assert (tmp_path / "log").read_text() == "begun\nshut down\n"


def test_a_worker_that_is_being_built_is_given_up(shell: Any, tmp_path: Any) -> None:
    building = shell.build.remote(Slow.make, (str(tmp_path / "log"), 60.0), {}, time.time())
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
