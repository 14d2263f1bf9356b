"""Worker groups and worker hosts, with minimal workers."""

import asyncio
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain, count
from unittest.mock import patch

import numpy as np
import pytest
import ray
from ray.util import remove_placement_group

from megarl.cluster.placement.pool import Slot, SlotPool, reserve
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.process.ports import join_world
from megarl.cluster.workers import dispatch, failures
from megarl.cluster.workers.dispatch import (
    BROADCAST,
    Dispatch,
    LocalPayload,
    StoredItem,
    StoredPayload,
    as_arguments,
    distinct_refs,
    fetch_all,
    fetch_arguments,
)
from megarl.cluster.workers.failures import NUM_LOOKS, find_losses, interruptible, late_names, wait_all
from megarl.cluster.workers.group import WorkerGroup, WorkerProcesses, by_node, ranks_by_relay
from megarl.cluster.workers.stragglers import MIN_CONSECUTIVE_STEPS, StragglerMonitor, collect_stacks
from megarl.cluster.workers.worker_host import AsyncWorkerHost
from megarl.config.placement import PlacementConfig
from megarl.errors import HungWorkerError, LostRankError, LostWorkerError, RewardError, WeightSyncError, WorkerError
from megarl.run.supervision.run_monitor import PhaseWatchdog
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("cluster")

EACH = Dispatch(lambda argument, grid: [argument] * grid.size, lambda results, _: list(results))
EQUAL_WORK = replace(BROADCAST, equal_work=True)
PER_RANK = replace(EACH, distribute=lambda argument, grid: [argument + r for r in range(grid.size)])
ERRORS = {
    "ValueError": ValueError("of no use"),
    "RewardError": RewardError("a reward of nothing"),
    "LostRankError": LostRankError("lost the connection"),
    "WeightSyncError": WeightSyncError("the boxes are wrong"),
}


class Worker:
    """A worker whose calls fail in chosen ways; `released`: file whose existence ends the waits of its ranks."""

    busy_seconds = 0.0

    def __init__(self, greeting, released=None):
        self.greeting, self.rank, self.released = greeting, int(os.environ["RANK"]), released
        self.noted = []

    def where(self, _):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FLAG")
        return self.greeting, *(os.environ[name] for name in names)

    def fail(self, how):
        """Fail on each rank in the given way; a rank that stalls waits as in a collective."""
        match how[self.rank]:
            case "stall":
                assert self.released is not None
                wait_until(self.released.exists, UNREACHED_SECONDS)
            case name if name in ERRORS:
                raise ERRORS[name]
            case "DistBackendError":
                import torch.distributed as dist

                raise dist.DistBackendError("NCCL error: remote process exited")
            case "SIGKILL":
                sys.stderr.write("last line of stderr\n")
                os.kill(os.getpid(), signal.SIGKILL)
        return self.rank

    def note(self, array):
        """Return the sizes of the arrays of all calls so far."""
        self.noted.append(len(array))
        return self.noted

    def meet(self, seconds):
        """Count as busy for `seconds` of the rank."""
        self.busy_seconds += seconds[self.rank]


class Opposite:
    """A second worker in the same processes."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])

    def number(self, scale):
        if scale < 0 and self.rank == 1:
            raise ValueError("below zero")
        return np.full(100_000, scale * (self.rank + 1))

    def add_up(self, payload):
        return sum(int(part.sum()) for part in payload.fetch())


class Member:
    """A worker that joins torch.distributed's world."""

    def __init__(self):
        join_world("gloo", timedelta(seconds=HANG_SECONDS))

    def add_ranks(self, _):
        import torch
        import torch.distributed as dist

        number = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(number)
        return int(number)


@contextmanager
def start_processes(num_relays):
    """Start two processes: directly called, through a relay, or through a relay each, as if on nodes of their own."""
    pool = reserve(PlacementConfig(slots_per_node=2, start_timeout_seconds=HANG_SECONDS))
    slots = pool.slots
    if num_relays == 2:
        slots = tuple(replace(slot, node=f"node{i}") for i, slot in enumerate(slots))
    with patch("megarl.cluster.workers.group.ranks_by_relay", by_node if num_relays else lambda _: []):
        processes = WorkerProcesses("worker", replace(pool, slots=slots), {"FLAG": "flag"})
    assert len(processes.relays) == num_relays
    yield processes
    processes.stop()
    remove_placement_group(pool.group)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["direct", "one relay", "two relays"])
def num_relays(request):
    return request.param


@pytest.fixture(scope="module")
def processes(cluster, num_relays):
    """Two processes for all tests that leave them idle."""
    with start_processes(num_relays) as processes:
        yield processes


group_numbers = count()


def start(processes, factory, *arguments, **grid):
    """Start a group with a new name, data-parallel by default."""
    group = WorkerGroup(f"group{next(group_numbers)}", processes, RankGrid(**(grid or {"dp": 2})))
    group.start(factory, arguments).result(HANG_SECONDS)
    return group


@contextmanager
def stalling_group(processes, folder):
    """Start workers that may stall until the end of the block."""
    try:
        yield start(processes, Worker, "hello", folder / "released")
    finally:
        (folder / "released").touch()


@pytest.fixture
def group(processes, tmp_path):
    with stalling_group(processes, tmp_path) as group:
        yield group


@pytest.fixture
def mortal(tmp_path, num_relays):
    """Processes of this test only, which may be killed."""
    with start_processes(num_relays) as processes, stalling_group(processes, tmp_path) as group:
        yield processes, group


@pytest.fixture
def others(processes):
    return start(processes, Opposite)


def set_in_waits(processes, monkeypatch, **values):
    """Set constants of `megarl.cluster.workers.failures` in this process and in the relays."""

    def set_all(relay):
        from megarl.cluster.workers import failures

        for name, value in values.items():
            setattr(failures, name, value)

    for name, value in values.items():
        monkeypatch.setattr(f"megarl.cluster.workers.failures.{name}", value)
    ray.get([relay.handle.__ray_call__.remote(set_all) for relay in processes.relays], timeout=HANG_SECONDS)


def pending(call):
    """Return the references of a call that has not been answered."""
    return ray.wait(list(call.refs), num_returns=len(call.refs), timeout=0)[1]


def firsts(parts):
    return [part[0] for part in parts]


def test_every_rank_has_its_distributed_variables(group):
    first, second = group.call(Worker.where, None, dispatch=EACH)
    greeting, rank, world, local, address, port, flag = first
    assert (greeting, rank, world, local, flag) == ("hello", "0", "2", "0", "flag")
    assert second == (greeting, "1", world, local, address, port, flag)
    assert int(port) > 0
    assert group.call(Worker.where, None, dispatch=BROADCAST) == first


def test_master_port_is_held_until_the_ranks_use_it(processes):
    port = int(processes.rank_variables()[0]["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert start(processes, Member).call(Member.add_ranks, None, dispatch=EACH) == [3, 3]
    assert processes.rank_variables()[0]["MASTER_PORT"] == str(port)


def test_roles_share_processes_and_pass_remote_results(group, others, processes):
    (_, *variables), _ = group.call(Worker.where, None, dispatch=EACH)
    again = start(processes, Worker, "goodbye", tp=2)
    assert again.call(Worker.where, None, dispatch=BROADCAST) == ("goodbye", *variables)
    assert group.call(Worker.where, None, dispatch=BROADCAST) == ("hello", *variables)
    remote_results = others.call_remote(Opposite.number, 10, dispatch=BROADCAST)
    assert others.call(Opposite.add_up, remote_results, dispatch=EACH) == [3_000_000, 3_000_000]
    assert firsts(remote_results.fetch()) == [10, 20]
    staged = start(processes, Opposite, pp=2)  # only the output rank keeps a result
    assert firsts(staged.call_remote(Opposite.number, 1, dispatch=BROADCAST).fetch()) == [2]


def test_a_large_argument_is_stored_once_for_the_ranks_that_share_it(processes):
    """Ranks are sent a reference, and their workers get the value."""
    others = start(processes, Opposite, tp=2)
    with patch.object(ray, "put", wraps=ray.put) as put:
        assert firsts(others.call(Opposite.number, 3, dispatch=replace(EACH, by_reference=True))) == [3, 6]
        assert put.call_count == 1
        assert firsts(others.call(Opposite.number, 3, dispatch=replace(PER_RANK, by_reference=True))) == [3, 8]
        assert put.call_count == 3


def prepare_double(argument):
    if argument < 0:
        raise ValueError("cannot be prepared")
    return 2 * argument


def test_the_first_rank_of_a_node_prepares_an_argument_for_the_ranks_that_share_it(processes, num_relays):
    others = start(processes, Opposite, tp=2)
    shared, own = (replace(d, by_reference=True, prepare=prepare_double) for d in (EACH, PER_RANK))
    if num_relays == 2:  # each rank is alone on its node
        assert firsts(others.call(Opposite.number, 3, dispatch=shared)) == [3, 6]
        return
    # however long the call takes: calls of many seconds are not fetched one by one
    with patch.object(ray, "get", wraps=ray.get) as get, patch.object(failures, "NUM_LOOKS", 1_000_000):
        assert firsts(others.call(Opposite.number, 3, dispatch=shared)) == [6, 12]
        got = [value for call in get.call_args_list for value in np.atleast_1d(call.args[0])]
        # of the first rank only that it has prepared the argument
        assert len(got) == (1 if num_relays else 3)
    assert firsts(others.call(Opposite.number, 3, dispatch=own)) == [3, 8]
    assert len(others.call_remote(Opposite.number, 3, dispatch=shared).refs) == 1
    failed = rf"(?s)^{others.name}\.number failed on {others.name} rank 0:\n.*ValueError: cannot be prepared"
    with pytest.raises(WorkerError, match=failed):
        others.call(Opposite.number, -1, dispatch=shared)


def test_remote_results_are_not_fetched(others):
    failed = rf"(?s)^{others.name}\.number failed on {others.name} rank 1:\n.*ValueError: below zero"
    with pytest.raises(WorkerError, match=failed):
        others.call_remote(Opposite.number, -1, dispatch=BROADCAST)
    with patch.object(ray, "get", wraps=ray.get) as get:
        remote_results = others.call_remote(Opposite.number, 1, dispatch=BROADCAST)
    got = [ref for call in get.call_args_list for ref in np.atleast_1d(call.args[0])]
    assert got
    assert not set(got) & set(remote_results.refs)


def test_subset_of_a_pool_keeps_the_given_order():
    slots = tuple(Slot(bundle=i, cpus=1.0, gpus=0.0, node="n", gpu_id=None) for i in range(4))
    part = SlotPool(None, slots, "cpu").subset([3, 1])
    assert [slot.bundle for slot in part.slots] == [3, 1]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (("ValueError", "stall"), WorkerError, r"(?s)^#\.fail failed on # rank 0:\n.*ValueError: of no use"),
        (("stall", "ValueError"), WorkerError, r"(?s)^#\.fail failed on # rank 1:\n.*ValueError: of no use"),
        (("stall", "RewardError"), RewardError, r"^a reward of nothing$"),
        (("stall", "DistBackendError"), LostRankError, r"(?s)^#\.fail failed on # rank 1:\n.*NCCL error"),
        # of several failures, the cause of the others is raised
        (("LostRankError", "WeightSyncError"), WeightSyncError, "^the boxes are wrong$"),
        (("WeightSyncError", "LostRankError"), WeightSyncError, "^the boxes are wrong$"),
        (("LostRankError", "ValueError"), WorkerError, r"(?s)^#\.fail failed on # rank 1:\n.*ValueError: of no use"),
        (("LostRankError", "nothing"), LostRankError, "^lost the connection$"),
        (("WeightSyncError", "stall"), WeightSyncError, "^the boxes are wrong; no answer from # rank 1$"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("looks", [0, NUM_LOOKS])
def test_cause_of_a_failure_is_raised_without_waiting_for_ranks_that_stall(
    group, processes, how, error, message, looks, monkeypatch
):
    # if both ranks answer, the second is waited for however late it is
    seconds = 0.1 if "stall" in how else HANG_SECONDS
    set_in_waits(processes, monkeypatch, NUM_LOOKS=looks, ROOT_CAUSE_SECONDS=seconds)
    with pytest.raises(error, match=message.replace("#", group.name)):
        group.call(Worker.fail, how, dispatch=BROADCAST)


def test_killed_rank_is_the_cause_and_named_with_the_end_of_its_log(mortal, monkeypatch):
    processes, group = mortal
    set_in_waits(processes, monkeypatch, ROOT_CAUSE_SECONDS=HANG_SECONDS)
    with pytest.raises(LostWorkerError) as error:
        group.call(Worker.fail, ("WeightSyncError", "SIGKILL"), dispatch=BROADCAST)
    text = str(error.value)
    assert text.startswith(f"{group.name}.fail: {group.name} rank 1 died. ")
    assert re.search(r"\nthe end of \S+\.err:\n(.*\n)*last line of stderr$", text)


def test_calls_run_in_the_order_in_which_they_were_begun(group):
    sizes = [1, 200_000, 2, 3, 400_000, 4]  # large arguments go through the object store
    calls = [group.begin(Worker.note, np.zeros(size, np.int8), dispatch=EACH) for size in sizes]
    *_, last = [call.result(HANG_SECONDS) for call in calls]
    assert last == [sizes, sizes]


def test_a_lost_relay_is_named_by_its_ranks(mortal, num_relays):
    processes, group = mortal
    if not num_relays:
        pytest.skip("the ranks are called directly")
    call = group.begin(Worker.fail, ("nothing", "stall"), dispatch=BROADCAST)
    assert wait_until(lambda: late_names(call.names, pending(call)) == [f"{group.name} rank 1"])
    ray.kill(processes.relays[-1].handle)
    ranks = f"{group.name} rank 0 to {group.name} rank 1" if num_relays == 1 else f"{group.name} rank 1"
    with pytest.raises(LostWorkerError, match=rf"^{group.name}\.fail: {ranks} died\. "):
        call.result(HANG_SECONDS)
    late = [f"{group.name} rank {rank}" for rank in processes.relays[-1].ranks]
    assert late_names(call.names, call.refs[-1:]) == late


def test_ranks_have_relays_where_that_saves_calls():
    def relayed(*nodes):
        return ranks_by_relay([Slot(i, 1.0, 0.0, node, None) for i, node in enumerate(nodes)])

    assert relayed("a", "a", "b", "b", "a") == [[0, 1, 4], [2, 3]]
    assert relayed("a", "a") == relayed("a", "b") == relayed("a") == []
    assert relayed(*(str(rank // 8) for rank in range(64))) == [list(range(n, n + 8)) for n in range(0, 64, 8)]
    assert relayed(*(str(rank // 8) for rank in range(512)))[-2:] == [list(range(480, 504)), list(range(504, 512))]


@pytest.mark.parametrize("num_nodes", [3, 9, 16, 64, 1000])
def test_nodes_share_relays_so_that_the_calls_of_controller_and_relay_are_few(num_nodes):
    """Compare with all numbers of nodes for each relay."""
    relays = ranks_by_relay([Slot(i, 1.0, 0.0, str(i // 8), None) for i in range(8 * num_nodes)])
    assert list(chain.from_iterable(relays)) == list(range(8 * num_nodes))
    fewest = min(-(-num_nodes // shared) + 8 * shared for shared in range(1, num_nodes + 1))
    assert fewest <= len(relays) + max(map(len, relays)) <= fewest + 1


def test_joined_calls_are_waited_for_together(group, others, num_relays):
    def begin(scale):
        first = group.begin(Worker.fail, ("", ""), dispatch=EACH)
        return first.joined_with(others.begin(Opposite.number, scale, dispatch=EACH))

    ranks, numbers = begin(3).result(HANG_SECONDS)
    assert (ranks, firsts(numbers)) == ([0, 1], [3, 6])
    what = rf"{others.name}\.number"
    if not num_relays:  # a relay knows its own call only
        what = rf"{group.name}\.fail and {what}"
    failed = rf"(?s)^{what} failed on {others.name} rank 1:\n"
    with pytest.raises(WorkerError, match=failed):
        begin(-1).result(HANG_SECONDS)


def test_dead_and_silent_processes_are_found(mortal):
    processes, group = mortal
    actors = processes.named_actors()
    assert find_losses(actors, HANG_SECONDS) == (None, [])
    group.begin(Worker.fail, ("stall", "nothing"), dispatch=BROADCAST)
    assert wait_until(lambda: find_losses(actors, 1.0) == (None, ["worker rank 0"]))
    os.kill(ray.get(processes.actors[1].process_info.remote()).pid, signal.SIGKILL)
    loss, _ = find_losses(actors, UNREACHED_SECONDS)
    assert isinstance(loss, LostWorkerError)
    assert str(loss).startswith("liveness check: worker rank 1 died. ")


@pytest.mark.parametrize("looks", [0, NUM_LOOKS])
def test_a_wait_is_interrupted_or_names_late_ranks(group, looks, monkeypatch):
    monkeypatch.setattr("megarl.cluster.workers.failures.NUM_LOOKS", looks)
    assert group.call(Worker.fail, ("", ""), dispatch=EACH) == [0, 1]  # from now on both ranks answer at once
    call = group.begin(Worker.fail, ("stall", "nothing"), dispatch=BROADCAST)
    assert wait_until(lambda: late_names(call.names, pending(call)) == [f"{group.name} rank 0"])
    late = rf"^{group.name}\.fail: no answer within 0\.3 s from {group.name} rank 0$"
    with pytest.raises(HungWorkerError, match=late):
        call.result(0.3)
    interrupt = threading.Event()
    threading.Timer(0.1, interrupt.set).start()
    with pytest.raises(KeyboardInterrupt), interruptible(interrupt):
        call.result()
    assert interrupt.is_set()


def test_stopped_rank_is_named_and_all_stacks_are_written(group, processes, tmp_path):
    infos = processes.processes()
    assert list(infos) == ["worker rank 0", "worker rank 1"]
    stopped = infos["worker rank 1"]
    assert {info.node_id for info in infos.values()} == {ray.get_runtime_context().get_node_id()}
    messages = []
    watchdog = PhaseWatchdog(3.0, messages.append, lambda: collect_stacks(infos, HANG_SECONDS), tmp_path)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        call = group.begin(Worker.meet, (0.0, 0.0), dispatch=BROADCAST)
        assert wait_until(lambda: late_names(call.names, pending(call)) == [f"{group.name} rank 1"])
        with pytest.raises(WorkerError) as error, watchdog.phase(12, "train"):
            call.result()
        file = tmp_path / "stacks" / "step-000012-train.txt"
        message = f"train of step 12 took longer than 3 s; no answer from {group.name} rank 1; stacks: {file}"
        assert str(error.value) == messages[-1] == message
        text = file.read_text()
        line = rf"^worker rank 1 \(pid {stopped.pid} on {stopped.host}\): stopped, in \w+"
        assert re.search(line, text, re.MULTILINE)
        sections = [section for section in text.split("\n== ") if section.startswith("worker rank ")]
        assert [section.split(" (")[0] for section in sections] == list(infos)
        assert all('"MainThread"\n' in section for section in sections)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert group.call(Worker.where, None, dispatch=EACH)[1][1] == "1"
    lost = {"worker rank 0": infos["worker rank 0"], "engine 7": replace(stopped, node_id="ab" * 28, host="n9")}
    text = collect_stacks(lost, HANG_SECONDS)
    assert "\nn9: no stacks of engine 7: " in text
    assert f"== worker rank 0 (pid {infos['worker rank 0'].pid}" in text


def test_only_calls_with_equal_work_have_stragglers(group, processes):
    messages = []
    monitor = StragglerMonitor(["n1", "n2"], messages.append)
    processes.pop_call_records()
    for _ in range(MIN_CONSECUTIVE_STEPS):
        group.call(Worker.meet, (0.75, 0.25), dispatch=BROADCAST)
        assert monitor.step(processes.pop_call_records()) == {}
    assert messages == []
    for _ in range(MIN_CONSECUTIVE_STEPS):
        group.call_remote(Worker.meet, (0.75, 0.25), dispatch=BROADCAST)
        group.call(Worker.meet, (0.25, 0.75), dispatch=EQUAL_WORK)
        records = processes.pop_call_records()
        assert [[(r.role, r.method, r.busy_seconds, r.stage) for r in rank] for rank in records] == [
            [(group.name, "meet", 0.25, 0)],
            [(group.name, "meet", 0.75, 0)],
        ]
        assert monitor.step(records) == {f"straggler/{group.name}.meet_ratio": 3.0}
    (message,) = messages
    assert message.startswith(f"{group.name} rank 1 (node n2) was busy 3.0 times as long as the median in meet, ")
    staged = start(processes, Worker, "hello", pp=2)
    staged.call_remote(Worker.meet, (0.0, 0.0), dispatch=EQUAL_WORK)
    assert [[record.stage for record in records] for records in processes.pop_call_records()] == [[0], [1]]


class Slow:
    """A worker that may be slow to build, and whose calls wait for each other; logs its life cycle to a file."""

    def __init__(self, log):
        self.log, self.num_waiting, self.all_wait = log, 0, asyncio.Event()

    @classmethod
    async def make(cls, log, seconds):
        slow = cls(log)
        slow.note("begun")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            slow.note("cancelled")
            raise
        return slow

    def note(self, text):
        with self.log.open("a") as file:
            file.write(text + "\n")

    async def meet(self, num_calls):
        """Wait until `num_calls` calls wait."""
        self.num_waiting += 1
        if self.num_waiting == num_calls:
            self.all_wait.set()
        await self.all_wait.wait()
        return num_calls

    async def shutdown(self):
        self.note("shut down")


def test_life_of_an_async_host(tmp_path):
    """Its construction is cancelled, its calls run concurrently, and it is shut down even while it is busy."""
    log = tmp_path / "log"
    host = ray.remote(AsyncWorkerHost).options(num_cpus=0, max_concurrency=100).remote({"FLAG": "flag"})
    ray.get(host.stop.remote(), timeout=HANG_SECONDS)  # without a worker, this does nothing
    building = host.build.remote(Slow.make, (log, UNREACHED_SECONDS), {}, time.time())
    assert wait_until(log.exists)
    assert not ray.wait([building], timeout=0)[0]
    ray.get(host.stop.remote(), timeout=HANG_SECONDS)
    assert log.read_text() == "begun\ncancelled\n"
    assert ray.wait([building], timeout=HANG_SECONDS)[0]

    ray.get(host.build.remote(Slow.make, (log, 0.0), {}, time.time()), timeout=HANG_SECONDS)
    refs = [host.invoke.remote("meet", 20) for _ in range(20)]
    assert wait_all(refs, what="meet", names={}, timeout=HANG_SECONDS) == [20] * 20
    host.invoke.remote("meet", 1000)
    ray.get(host.stop.remote(), timeout=HANG_SECONDS)
    assert log.read_text() == "begun\ncancelled\nbegun\nshut down\n"
    ray.kill(host)


@ray.remote
def sum_arguments(*stored):
    return sum(fetch_arguments(stored))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_any_number_of_stored_values_can_be_arguments(count, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_ARGUMENTS", 2)
    arguments = as_arguments([ray.put(10**i) for i in range(count)])
    assert len(arguments) == (count if count <= 2 else 1)
    assert ray.get(sum_arguments.options(num_cpus=0).remote(*arguments), timeout=HANG_SECONDS) == (10**count - 1) // 9


def test_items_of_one_object_are_fetched_once():
    first, second = ray.put(["a", "b", "c"]), ray.put(["d"])
    items = [StoredItem(first, 2), StoredItem(second, 0), StoredItem(first, 0)]
    assert fetch_all([*items, LocalPayload("e")]) == ["c", "d", "a", "e"]
    assert items[0].fetch() == "c"
    assert LocalPayload([1, 2]).fetch() == StoredPayload(ray.put([1, 2])).fetch() == [1, 2]
    assert distinct_refs(items) == ([first, second], ((0, 2), (1, 0), (0, 0)))
