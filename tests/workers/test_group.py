"""Worker groups and worker hosts, with minimal workers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import ray
from ray.util import remove_placement_group

from megarl.config.placement import PlacementConfig
from megarl.errors import (
    HungWorkerError,
    LostRankError,
    LostWorkerError,
    MegarlError,
    RewardError,
    WeightSyncError,
    WorkerError,
)
from megarl.placement.pool import Slot, SlotPool, reserve
from megarl.placement.rank_grid import RankGrid
from megarl.supervision.phase_watchdog import PhaseWatchdog
from megarl.workers import payload
from megarl.workers.dispatch import BROADCAST, Dispatch
from megarl.workers.failures import find_losses, interruptible, wait_all
from megarl.workers.group import WorkerGroup, WorkerProcesses
from megarl.workers.master_port import join_world
from megarl.workers.payload import (
    LocalPayload,
    Payload,
    StoredItem,
    StoredPayload,
    as_arguments,
    distinct_refs,
    fetch_all,
    fetch_arguments,
)
from megarl.workers.stack_collector import collect_stacks
from megarl.workers.stragglers import MIN_CONSECUTIVE_STEPS, StragglerMonitor
from megarl.workers.worker_host import AsyncWorkerHost
from tests.end_to_end.launched import wait_until
from tests.time_limits import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("cluster")


class Worker:
    def __init__(self, greeting: str) -> None:
        self.greeting, self.rank = greeting, int(os.environ["RANK"])

    def where(self, _: Any) -> Any:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FLAG")
        return self.greeting, *(os.environ[name] for name in names)

    def fail(self, argument: tuple[int, str]) -> Any:
        """Fail on one rank while the others wait for it, as in a collective."""
        rank, how = argument
        if self.rank != rank:
            time.sleep(2 * HANG_SECONDS)
        match how:
            case "ValueError":
                raise ValueError("of no use")
            case "RewardError":
                raise RewardError("a reward of nothing")
            case "DistBackendError":
                import torch.distributed as dist

                raise dist.DistBackendError("NCCL error: remote process exited")
            case "SIGKILL":
                sys.stderr.write("last line of stderr\n")
                os.kill(os.getpid(), signal.SIGKILL)
        return None

    def fail_each(self, how: tuple[str, str]) -> Any:
        """Fail on each rank in the given way, on rank 1 later than on rank 0."""
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
                time.sleep(2 * HANG_SECONDS)
        return self.rank

    def meet(self, seconds: float) -> None:
        """Wait for `seconds` on rank 0 and compute for `seconds` on rank 1."""
        self._compute_on(1, seconds)

    def push_weights(self, seconds: float) -> None:
        """Compute for `seconds` on rank 0, which alone has the work, while rank 1 waits."""
        self._compute_on(0, seconds)

    def _compute_on(self, rank: int, seconds: float) -> None:
        ends = time.thread_time() + seconds
        if self.rank != rank:
            time.sleep(seconds)
        while self.rank == rank and time.thread_time() < ends:
            pass


EACH: Dispatch[Any, Any] = Dispatch(lambda argument, grid: [argument] * grid.size, lambda results, _: list(results))

EQUAL_WORK: Dispatch[Any, Any] = replace(BROADCAST, equal_work=True)


class Opposite:
    """A second worker in the same processes."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])

    def number(self, scale: int) -> np.ndarray:
        if scale < 0 and self.rank == 1:
            raise ValueError("below zero")
        return np.full(100_000, scale * (self.rank + 1))

    def add_up(self, payload: Payload[tuple[np.ndarray, ...]]) -> int:
        return sum(int(part.sum()) for part in payload.fetch())


class Member:
    """A worker that joins torch.distributed's world."""

    def __init__(self) -> None:
        join_world("gloo", timedelta(seconds=60))

    def add_ranks(self, _: Any) -> int:
        import torch
        import torch.distributed as dist

        number = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(number)
        return int(number)


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


def test_every_rank_has_its_distributed_variables(group: WorkerGroup[Worker]) -> None:
    first, second = group.call(Worker.where, None, dispatch=EACH)
    greeting, rank, world, local, address, port, flag = first
    assert (greeting, rank, world, local, flag) == ("hello", "0", "2", "0", "flag")
    assert second == (greeting, "1", world, local, address, port, flag)
    assert int(port) > 0
    assert group.call(Worker.where, None, dispatch=BROADCAST) == first


def test_master_port_is_held_until_the_ranks_use_it(processes: WorkerProcesses) -> None:
    port = int(processes.rank_variables()[0]["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    members: WorkerGroup[Member] = WorkerGroup("members", processes, RankGrid(dp=2))
    members.start(Member, ()).result(60)
    assert members.call(Member.add_ranks, None, dispatch=EACH) == [3, 3]
    assert processes.rank_variables()[0]["MASTER_PORT"] == str(port)


def test_roles_share_processes_and_pass_remote_results(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    (_, *variables), _ = group.call(Worker.where, None, dispatch=EACH)
    others: WorkerGroup[Opposite] = WorkerGroup("others", processes, RankGrid(dp=2))
    others.start(Opposite, ()).result(60)
    again: WorkerGroup[Worker] = WorkerGroup("again", processes, RankGrid(tp=2))
    again.start(Worker, ("goodbye",)).result(60)
    assert again.call(Worker.where, None, dispatch=BROADCAST) == ("goodbye", *variables)
    assert group.call(Worker.where, None, dispatch=BROADCAST) == ("hello", *variables)
    remote_results = others.call_remote(Opposite.number, 10, dispatch=BROADCAST)
    assert others.call(Opposite.add_up, remote_results, dispatch=EACH) == [3_000_000, 3_000_000]
    assert [part[0] for part in remote_results.fetch()] == [10, 20]


def test_a_large_argument_is_stored_once_for_the_ranks_that_share_it(processes: WorkerProcesses) -> None:
    """Ranks are sent a reference, and their workers get the value."""
    others: WorkerGroup[Opposite] = WorkerGroup("others", processes, RankGrid(tp=2))
    others.start(Opposite, ()).result(60)
    shared: Dispatch[Any, Any] = replace(EACH, by_reference=True)
    own: Dispatch[Any, Any] = replace(
        shared, distribute=lambda argument, grid: [argument + r for r in range(grid.size)]
    )
    with patch.object(ray, "put", wraps=ray.put) as put:
        assert [part[0] for part in others.call(Opposite.number, 3, dispatch=shared)] == [3, 6]
        assert put.call_count == 1
        assert [part[0] for part in others.call(Opposite.number, 3, dispatch=own)] == [3, 8]
        assert put.call_count == 3


def prepare_double(argument: int) -> int:
    if argument < 0:
        raise ValueError("cannot be prepared")
    return 2 * argument


def test_the_first_rank_prepares_an_argument_for_the_ranks_that_share_it(processes: WorkerProcesses) -> None:
    others: WorkerGroup[Opposite] = WorkerGroup("prepared", processes, RankGrid(tp=2))
    others.start(Opposite, ()).result(60)
    shared: Dispatch[Any, Any] = replace(EACH, by_reference=True, prepare=prepare_double)
    own: Dispatch[Any, Any] = replace(
        shared, distribute=lambda argument, grid: [argument + r for r in range(grid.size)]
    )
    with patch.object(ray, "get", wraps=ray.get) as get:
        assert [part[0] for part in others.call(Opposite.number, 3, dispatch=shared)] == [6, 12]
        got = [value for call in get.call_args_list for value in np.atleast_1d(call.args[0])]
        assert len(got) == 3  # of the first rank only that it has prepared the argument
    assert [part[0] for part in others.call(Opposite.number, 3, dispatch=own)] == [3, 8]
    assert len(others.call_remote(Opposite.number, 3, dispatch=shared).refs) == 1
    failed = r"(?s)^prepared\.number failed on prepared rank 0:\n.*ValueError: cannot be prepared"
    with pytest.raises(WorkerError, match=failed):
        others.call(Opposite.number, -1, dispatch=shared)


def test_output_rank_of_each_replica_keeps_the_result(processes: WorkerProcesses) -> None:
    staged: WorkerGroup[Opposite] = WorkerGroup("staged", processes, RankGrid(pp=2))
    staged.start(Opposite, ()).result(60)
    assert [part[0] for part in staged.call_remote(Opposite.number, 1, dispatch=BROADCAST).fetch()] == [2]


def test_remote_results_are_not_fetched(processes: WorkerProcesses) -> None:
    others: WorkerGroup[Opposite] = WorkerGroup("others", processes, RankGrid(dp=2))
    others.start(Opposite, ()).result(60)
    with pytest.raises(WorkerError, match=r"(?s)^others\.number failed on others rank 1:\n.*ValueError: below zero"):
        others.call_remote(Opposite.number, -1, dispatch=BROADCAST)
    with patch.object(ray, "get", wraps=ray.get) as get:
        remote_results = others.call_remote(Opposite.number, 1, dispatch=BROADCAST)
    got = [ref for call in get.call_args_list for ref in np.atleast_1d(call.args[0])]
    assert got
    assert not set(got) & set(remote_results.refs)


def test_subset_of_a_pool_keeps_the_given_order() -> None:
    slots = tuple(Slot(bundle=i, cpus=1.0, gpus=0.0, node="n", gpu_id=None) for i in range(4))
    part = SlotPool(None, slots, "cpu").subset([3, 1])
    assert [slot.bundle for slot in part.slots] == [3, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_failure_of_one_rank_is_raised_without_waiting_for_others(group: WorkerGroup[Worker], rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"(?s)^workers\.fail failed on workers rank {rank}:\n.*ValueError: of no use"
    ):
        group.call(Worker.fail, (rank, "ValueError"), dispatch=BROADCAST)
    assert time.monotonic() - started < HANG_SECONDS


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (("LostRankError", "WeightSyncError"), "^the boxes are wrong$"),
        (("WeightSyncError", "LostRankError"), "^the boxes are wrong$"),
        (
            ("LostRankError", "ValueError"),
            r"(?s)^workers\.fail_each failed on workers rank 1:\n.*ValueError: of no use",
        ),
        (("WeightSyncError", "SIGKILL"), r"^workers\.fail_each: workers rank 1 died\. "),
        (("LostRankError", "nothing"), "^lost the connection$"),
        (("WeightSyncError", "stall"), "^the boxes are wrong; no answer from workers rank 1$"),
    ],
)
def test_root_cause_of_a_failed_sync_is_raised(group: WorkerGroup[Worker], how: tuple[str, str], message: str) -> None:
    with pytest.raises(MegarlError, match=message):
        group.call(Worker.fail_each, how, dispatch=BROADCAST)


def test_joined_calls_are_waited_for_together(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    others: WorkerGroup[Opposite] = WorkerGroup("others", processes, RankGrid(dp=2))
    others.start(Opposite, ()).result(60)
    first, second = (
        group.begin(Worker.fail_each, ("", ""), dispatch=EACH),
        others.begin(Opposite.number, 3, dispatch=EACH),
    )
    ranks, numbers = first.joined_with(second).result(30)
    assert (ranks, [part[0] for part in numbers]) == ([0, 1], [3, 6])
    first, second = (
        group.begin(Worker.fail_each, ("", ""), dispatch=EACH),
        others.begin(Opposite.number, -1, dispatch=EACH),
    )
    with pytest.raises(WorkerError, match=r"(?s)^workers\.fail_each and others\.number failed on others rank 1:\n"):
        first.joined_with(second).result(30)


def test_megarl_error_is_raised_unchanged(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(RewardError, match=r"^a reward of nothing$"):
        group.call(Worker.fail, (1, "RewardError"), dispatch=BROADCAST)


def test_killed_rank_is_named_with_the_end_of_its_log(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError) as error:
        group.call(Worker.fail, (1, "SIGKILL"), dispatch=BROADCAST)
    text = str(error.value)
    assert text.startswith("workers.fail: workers rank 1 died. ")
    assert re.search(r"\nthe end of \S+\.err:\n(.*\n)*last line of stderr$", text)


def test_a_rank_that_lost_its_peers_in_nccl_is_told_apart_from_other_errors(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(LostRankError, match=r"(?s)^workers\.fail failed on workers rank 1:\n.*NCCL error"):
        group.call(Worker.fail, (1, "DistBackendError"), dispatch=BROADCAST)


def test_dead_and_silent_processes_are_found(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    actors = processes.named_actors()
    assert find_losses(actors, HANG_SECONDS) == (None, [])
    group.begin(Worker.fail, (1, "nothing"), dispatch=BROADCAST)
    assert find_losses(actors, 3.0) == (None, ["worker rank 0"])
    os.kill(ray.get(processes.actors[1].process_info.remote()).pid, signal.SIGKILL)
    began = time.monotonic()
    loss, _ = find_losses(actors, 2 * HANG_SECONDS)
    assert isinstance(loss, LostWorkerError)
    assert str(loss).startswith("liveness check: worker rank 1 died. ")
    assert time.monotonic() - began < HANG_SECONDS


def test_a_wait_is_interrupted(group: WorkerGroup[Worker]) -> None:
    interrupt = threading.Event()
    threading.Timer(0.3, interrupt.set).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruptible(interrupt):
        group.call(Worker.fail, (1, "nothing"), dispatch=BROADCAST)
    assert 0.2 < time.monotonic() - began < HANG_SECONDS


def test_late_rank_is_named(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(HungWorkerError, match=r"^workers\.fail: no answer within 3 s from workers rank 0$"):
        group.call(Worker.fail, (1, "nothing"), dispatch=BROADCAST, timeout=3.0)


def test_stopped_rank_is_named_and_all_stacks_are_written(
    group: WorkerGroup[Worker], processes: WorkerProcesses, tmp_path: Path
) -> None:
    infos = processes.processes()
    assert list(infos) == ["worker rank 0", "worker rank 1"]
    stopped = infos["worker rank 1"]
    here = ray.get_runtime_context().get_node_id()
    assert {info.node_id for info in infos.values()} == {here}
    messages: list[str] = []
    watchdog = PhaseWatchdog(5.0, messages.append, lambda: collect_stacks(infos), tmp_path)
    os.kill(stopped.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(WorkerError) as error, watchdog.phase(12, "train"):
            group.call(Worker.meet, 0.1, dispatch=BROADCAST)
        assert time.monotonic() - began < HANG_SECONDS
        file = tmp_path / "stacks" / "step-000012-train.txt"
        message = f"train of step 12 took longer than 5 s; no answer from workers rank 1; stacks: {file}"
        assert str(error.value) == messages[-1] == message
        text = file.read_text()
        assert re.search(
            rf"^worker rank 1 \(pid {stopped.pid} on {stopped.host}\): stopped, in \w+", text, re.MULTILINE
        )
        sections = [section for section in text.split("\n== ") if section.startswith("worker rank ")]
        assert [section.split(" (")[0] for section in sections] == list(infos)
        assert all('"MainThread"\n' in section for section in sections)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert group.call(Worker.where, None, dispatch=EACH)[1][1] == "1"


def test_processes_of_a_lost_node_are_listed(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    first = processes.processes()["worker rank 0"]
    infos = {"worker rank 0": first, "engine 7": replace(first, node_id="ab" * 28, host="n9")}
    text = collect_stacks(infos, timeout=10.0)
    assert "\nn9: no stacks of engine 7: " in text
    assert f"== worker rank 0 (pid {first.pid}" in text


def test_processes_record_busy_seconds_of_their_ranks(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    group.call(Worker.meet, 0.3, dispatch=EQUAL_WORK)
    idle, busy = processes.pop_call_records()
    assert [(record.role, record.method) for record in idle + busy] == [("workers", "meet")] * 2
    assert idle[0].busy_seconds < 0.1 < 0.29 < idle[0].seconds
    assert busy[0].busy_seconds > 0.25
    assert processes.pop_call_records() == [[], []]


def test_only_calls_with_equal_work_have_stragglers(group: WorkerGroup[Worker], processes: WorkerProcesses) -> None:
    messages: list[str] = []
    monitor = StragglerMonitor(["n1", "n2"], messages.append)
    for _ in range(MIN_CONSECUTIVE_STEPS):
        group.call(Worker.push_weights, 0.3, dispatch=BROADCAST)
        assert monitor.step(processes.pop_call_records()) == {}
    assert messages == []
    for _ in range(MIN_CONSECUTIVE_STEPS):
        group.call_remote(Worker.push_weights, 0.3, dispatch=BROADCAST)
        group.call(Worker.meet, 0.3, dispatch=EQUAL_WORK)
        (phase,) = monitor.step(processes.pop_call_records())
        assert phase == "straggler/workers.meet_ratio"
    (message,) = messages
    assert re.fullmatch(r"workers rank 1 \(node n2\) was busy \S+ times as long as the median in meet, .*", message)


def test_calls_are_recorded_with_the_stage_of_their_role(processes: WorkerProcesses) -> None:
    staged: WorkerGroup[Worker] = WorkerGroup("staged", processes, RankGrid(pp=2))
    staged.start(Worker, ("hello",)).result(60)
    staged.call_remote(Worker.meet, 0.0, dispatch=EQUAL_WORK)
    assert [[record.stage for record in records] for records in processes.pop_call_records()] == [[0], [1]]


class Slow:
    """A worker that is slow to build and to call; logs its life cycle to a file."""

    def __init__(self, log: str) -> None:
        self.log = log

    @classmethod
    async def make(cls, log: str, seconds: float) -> Slow:
        slow = cls(log)
        slow.note("begun")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            slow.note("cancelled")
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
def host() -> Iterator[Any]:
    host = ray.remote(AsyncWorkerHost).options(num_cpus=0, max_concurrency=100).remote({"FLAG": "flag"})
    yield host
    ray.kill(host)


def test_calls_of_an_async_host_run_concurrently(host: Any, tmp_path: Any) -> None:
    ray.get(host.build.remote(Slow.make, (str(tmp_path / "log"), 0.0), {}, time.time()), timeout=HANG_SECONDS)
    started = time.monotonic()
    refs = [host.invoke.remote("work", 3.0) for _ in range(20)]
    assert wait_all(refs, what="work", names={}) == [3.0] * 20
    assert time.monotonic() - started < 30


def test_built_worker_is_shut_down_even_while_busy(host: Any, tmp_path: Any) -> None:
    ray.get(host.build.remote(Slow.make, (str(tmp_path / "log"), 0.0), {}, time.time()), timeout=HANG_SECONDS)
    host.invoke.remote("work", 2 * HANG_SECONDS)
    ray.get(host.stop.remote(), timeout=HANG_SECONDS)
    assert (tmp_path / "log").read_text() == "begun\nshut down\n"


def test_construction_of_a_worker_is_cancelled(host: Any, tmp_path: Any) -> None:
    building = host.build.remote(Slow.make, (str(tmp_path / "log"), 2 * HANG_SECONDS), {}, time.time())
    log = tmp_path / "log"
    assert wait_until(log.exists)
    assert not ray.wait([building], timeout=0)[0]
    ray.get(host.stop.remote(), timeout=HANG_SECONDS)
    assert log.read_text() == "begun\ncancelled\n"
    assert ray.wait([building], timeout=HANG_SECONDS)[0]


def test_stop_without_a_worker_does_nothing(host: Any) -> None:
    ray.get(host.stop.remote(), timeout=HANG_SECONDS)


def test_payloads_return_their_values() -> None:
    assert LocalPayload([1, 2]).fetch() == [1, 2]
    assert StoredPayload(ray.put([1, 2])).fetch() == [1, 2]


@ray.remote
def sum_arguments(*stored: Any) -> int:
    return sum(fetch_arguments(stored))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_any_number_of_stored_values_can_be_arguments(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_ARGUMENTS", 2)
    arguments = as_arguments([ray.put(10**i) for i in range(count)])
    assert len(arguments) == (count if count <= 2 else 1)
    assert ray.get(sum_arguments.options(num_cpus=0).remote(*arguments), timeout=HANG_SECONDS) == (10**count - 1) // 9


def test_items_of_one_object_are_fetched_once() -> None:
    first, second = ray.put(["a", "b", "c"]), ray.put(["d"])
    items = [StoredItem(first, 2), StoredItem(second, 0), StoredItem(first, 0)]
    assert fetch_all([*items, LocalPayload("e")]) == ["c", "d", "a", "e"]
    assert items[0].fetch() == "c"
    assert distinct_refs(items) == ([first, second], ((0, 2), (1, 0), (0, 0)))
