"""Supervision of engines that die or hang, with a fake Ray and clock."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from megarl.config.run import RecoveryConfig
from megarl.errors import LostEngineError, RestartLimitError, WeightSyncError, WorkerError
from megarl.run.supervision import engine_supervisor, restart_budget
from megarl.run.supervision.engine_supervisor import (
    GATHER_SECONDS,
    GRACE_SECONDS,
    KILL_WAIT_SECONDS,
    STOP_TIMEOUT_SECONDS,
    EngineSupervisor,
)
from megarl.run.supervision.restart_budget import RestartBudget
from tests.errors import expect_error
from tests.fake_ray import FakeRay, Ref

DIED = LostEngineError("the engine's scheduler process of TP rank 0 was ended by SIGKILL; the end of x.log:\nlast")


class FakeHandle:
    """Fake actor of an engine: answers pings and `stop` if `is_responsive`."""

    was_killed = False

    def __init__(self, is_responsive=True):
        self.is_responsive, self.watch, self.pings = is_responsive, Ref(), []
        self.invoke = SimpleNamespace(remote=self._invoke)
        self.stop = SimpleNamespace(remote=lambda: Ref(is_done=self.is_responsive))

    def _invoke(self, method):
        if method == "watch":
            return self.watch
        assert method == "ping"
        self.pings.append(Ref(is_done=self.is_responsive))
        return self.pings[-1]

    def die(self):
        self.was_killed = True


class FakeEngines:
    def __init__(self, count):
        self.actors, self.other_nodes, self.starting = [None] * count, [], []
        self.lost_nodes, self.has_memory = set(), True

    def may_allocate(self):
        return self.has_memory

    def has_live_node(self, replica):
        return replica not in self.lost_nodes

    def name(self, replica):
        return f"engine {replica}"

    def handles(self, replica):
        return [self.actors[replica], *self.other_nodes]

    def start(self, replica):
        self.actors[replica] = FakeHandle()
        self.starting.append(Ref())
        return self.starting[-1]


class CountingRay(FakeRay):
    """Counts its calls, and the seconds that they have waited."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def wait(self, refs, *, num_returns=1, timeout=None):
        self.num_calls += 1
        return super().wait(refs, num_returns=num_returns, timeout=timeout)

    def get(self, ref):
        self.num_calls += 1
        get = super().get
        return [get(each) for each in ref] if isinstance(ref, list) else get(ref)


@dataclass
class World:
    ray: "CountingRay"
    engines: FakeEngines
    supervisor: EngineSupervisor
    messages: list[str]
    resynced: list[int]

    def pass_time(self, seconds):
        for _ in range(round(seconds)):
            self.ray.now += 1.0
            self.supervisor.poll()


@pytest.fixture
def make_world(monkeypatch):
    def make_world(count=2, is_up=True, *, backoff_seconds=restart_budget.BACKOFF_SECONDS, **recovery):
        monkeypatch.setattr(restart_budget, "BACKOFF_SECONDS", backoff_seconds)
        ray, messages, resynced = CountingRay(), [], []
        monkeypatch.setattr(engine_supervisor, "time", ray)
        monkeypatch.setattr(engine_supervisor, "ray", ray)
        engine = SimpleNamespace(start_timeout_seconds=300.0)
        config = SimpleNamespace(recovery=RecoveryConfig(**recovery), rollout=SimpleNamespace(engine=engine))
        engines = FakeEngines(count)
        supervisor = EngineSupervisor(engines, count, config, RestartBudget(config.recovery, messages.append))
        supervisor.restore = lambda *replicas: resynced.extend(replicas) or replicas
        supervisor.start()
        if is_up:
            for ref in engines.starting:
                ref.end()
            supervisor.wait_started()
            engines.starting.clear()
        return World(ray, engines, supervisor, messages, resynced)

    return make_world


def kill(handle, error=DIED):
    handle.watch.end(error)


def test_dead_engine_is_restarted_and_receives_weights_before_it_serves(make_world):
    world = make_world()
    first = world.engines.actors[1]
    world.pass_time(100)
    assert world.supervisor.serving == world.supervisor.ready == [0, 1]
    kill(first)
    world.supervisor.poll()
    assert first.was_killed
    assert world.supervisor.serving == [0]
    world.pass_time(20)
    (starting,) = world.engines.starting
    assert world.engines.actors[1] is not first
    assert (world.supervisor.ready, world.resynced) == ([0], [])

    def resync(replica):
        assert (world.supervisor.serving, world.supervisor.ready) == ([0], [0, 1])
        world.resynced.append(replica)
        return () if len(world.resynced) == 1 else (replica,)  # it waits at first

    world.supervisor.restore = resync
    starting.is_done = True
    world.supervisor.poll()
    assert (world.supervisor.serving, world.supervisor.ready) == ([0], [0, 1])
    world.supervisor.poll()
    assert (world.supervisor.serving, world.resynced) == ([0, 1], [1, 1])
    assert world.messages == [
        "engine 1 was lost (the engine's scheduler process of TP rank 0 was ended by SIGKILL); "
        "restarting it (restart 1 of 40)",
        "engine 1 is serving again, 20.0 s after its loss was detected",
    ]


def test_engine_killed_during_start_is_restarted(make_world):
    world = make_world(2, is_up=False)
    first, second = world.engines.starting
    second.end()
    first.end(LostEngineError("the engine did not start: scheduler died"))
    world.supervisor.poll()
    assert world.supervisor.ready == [1]
    world.engines.starting[-1].is_done = True
    world.supervisor.wait_started()
    assert world.supervisor.serving == [0, 1]
    assert world.messages == [
        "engine 0 was lost (the engine did not start: scheduler died); restarting it (restart 1 of 40)"
    ]


def test_the_first_start_does_not_wait_for_an_engine_whose_node_is_lost(make_world):
    world = make_world(3, is_up=False)
    world.engines.lost_nodes.add(1)
    for index, ref in enumerate(list(world.engines.starting)):
        ref.end(LostEngineError("the node died") if index == 1 else None)
    world.ray.before_waiting = lambda: world.ray.now > 1000 and pytest.fail("waits for the lost engine")
    world.supervisor.wait_started()
    assert world.supervisor.serving == [0, 2]


def test_first_start_that_fails_without_a_death_is_not_retried(make_world):
    world = make_world(1, is_up=False)
    (ref,) = world.engines.starting
    ref.end(WorkerError("the engine did not start: no such model"))
    with expect_error(WorkerError, "model"):
        world.supervisor.wait_started()
    assert world.messages == []


def test_the_time_limit_of_a_start_counts_from_when_the_engine_may_allocate(make_world):
    world = make_world(count=2)
    world.engines.has_memory = False
    kill(world.engines.actors[0])
    world.pass_time(1000)
    assert len(world.engines.starting) == 1
    assert world.supervisor.starting == [0]
    world.engines.has_memory = True
    world.pass_time(299)
    assert world.supervisor.starting == [0]
    world.pass_time(3)
    assert world.messages[-1].startswith("engine 0 was lost (engine 0 did not start within 300 s (rollout.engine.start")


def test_closed_supervisor_does_not_restart_engines(make_world):
    world = make_world()
    world.supervisor.close()
    kill(world.engines.actors[0], LostEngineError("the engine was shut down"))
    with expect_error(RestartLimitError, "engines"):
        world.supervisor.poll()
    assert world.messages == []


def test_engine_that_answers_within_the_timeout_is_not_lost(make_world):
    world = make_world(1, engine_stall_seconds=20)
    handle = world.engines.actors[0]
    for _ in range(3):
        handle.is_responsive = False
        world.pass_time(18)
        handle.pings[-1].is_done = handle.is_responsive = True
        world.pass_time(2)
    assert world.messages == []
    assert len(handle.pings) == 3


def test_hung_engine_is_restarted_after_it_has_been_killed(make_world):
    world = make_world(1, engine_stall_seconds=20)
    handle = world.engines.actors[0]
    handle.is_responsive = False
    while not handle.was_killed:
        assert not world.engines.starting
        world.pass_time(1)
    assert world.messages[0].startswith(
        "engine 0 was lost (engine 0 has not answered a ping for 20 s (recovery.engine_s"
    )
    lost_at = world.ray.now
    while not world.engines.starting:
        world.pass_time(1)
    assert world.ray.now - lost_at >= KILL_WAIT_SECONDS - 3


def test_time_without_polling_does_not_count_as_hung(make_world):
    world = make_world(1, engine_stall_seconds=20)
    handle = world.engines.actors[0]
    handle.is_responsive = False
    world.pass_time(8)
    world.ray.now += 1000  # the trainer works
    world.pass_time(2)
    assert (world.messages, len(handle.pings)) == ([], 1)
    handle.pings[0].is_done = handle.is_responsive = True
    world.pass_time(30)
    assert world.messages == []


def test_time_without_polling_brings_no_ping(make_world):
    world = make_world(1, engine_stall_seconds=40)
    handle = world.engines.actors[0]
    world.pass_time(4)
    world.ray.now += 1000  # the trainer works
    world.pass_time(4)
    assert not handle.pings
    world.pass_time(4)
    assert len(handle.pings) == 1


def test_failed_restarts_back_off_and_finally_abort(make_world):
    world = make_world(1, max_identical_failures=3, backoff_seconds=4)
    kill(world.engines.actors[0])
    world.pass_time(1)
    failure = WorkerError("the engine did not start: out of memory")
    for wait, count in ((4, 2), (8, 3)):
        world.engines.starting[-1].end(failure)
        world.supervisor.poll()
        assert world.messages[-1].endswith(f"; restarting it in {wait} s (restart {count} of 20)")
        world.pass_time(wait - 1)
        assert len(world.engines.starting) == count - 1
        world.pass_time(1)
        assert len(world.engines.starting) == count
    world.engines.starting[-1].end(failure)
    with expect_error(WorkerError, "0", "3", "engine", "reason"):
        world.supervisor.poll()


def test_an_engine_that_cannot_start_is_left_out_while_others_serve(make_world):
    """Its GPU has failed, and no step has been completed meanwhile; the last engine ends the run."""
    world = make_world(3, max_identical_failures=3, backoff_seconds=0)
    failure = WorkerError("the engine did not start: CUDA error 999")
    for index in (1, 2):
        kill(world.engines.actors[index])
        world.supervisor.poll()
        for _ in range(3):
            world.engines.starting[-1].end(failure)
            world.supervisor.poll()
            assert 0 in world.supervisor.serving
        world.pass_time(10)
        assert world.supervisor.replicas[index].state == "gone"
        assert world.supervisor.starting == []
        assert world.messages[-1] == (
            f"engine {index} was lost too often for the same reason (recovery.max_identical_failures); the run "
            "continues without this engine: the engine did not start: CUDA error 999"
        )
    world.pass_time(100)
    kill(world.engines.actors[0])
    world.supervisor.poll()
    for _ in range(2):
        world.engines.starting[-1].end(failure)
        world.supervisor.poll()
    world.engines.starting[-1].end(failure)
    with expect_error(RestartLimitError, "0", "3", "engine", "reason"):
        world.supervisor.poll()


def test_engines_that_all_fail_alike_end_the_run(make_world):
    world = make_world(8, max_identical_failures=3, backoff_seconds=0)
    for handle in world.engines.actors:
        kill(handle)
    for num_starts in (8, 16):
        world.supervisor.poll()
        assert len(world.engines.starting) == num_starts
        for ref in world.engines.starting[-8:]:
            ref.end(DIED)
    with expect_error(RestartLimitError, "0", "3", "engine", "reason"):
        world.supervisor.poll()


def test_failed_push_is_attributed_to_an_engine_only_if_one_is_dead_or_hung(make_world):
    world = make_world(count=3, engine_stall_seconds=20)
    assert not world.supervisor.attribute_failure(WeightSyncError("trainer rank 1 is late"))
    assert not world.supervisor.attribute_failure(WorkerError("trainer rank 1 died"))
    kill(world.engines.actors[1])
    assert world.supervisor.attribute_failure(WorkerError("begin_weights: ..."))
    assert world.supervisor.wait_ready() == [0, 2]
    assert world.resynced == []
    world.engines.actors[0].is_responsive = False
    started_at = world.ray.now
    assert world.supervisor.attribute_failure(WeightSyncError("nothing from rank 2 within 8 s"))
    assert world.ray.now - started_at < 40
    assert world.supervisor.ready == [2]


def test_attribution_ends_once_every_engine_has_answered_one_ping(make_world):
    """While one engine answers slowly, the others are pinged again: some ping is always pending."""
    world = make_world(count=200, engine_stall_seconds=200)
    delays = {world.engines.actors[0]: 60} | dict.fromkeys(world.engines.actors[1::2], 5)
    for handle in delays:
        handle.is_responsive = False
    started_at, wait = world.ray.now, engine_supervisor.ray.wait

    def delayed_wait(refs, **given):
        assert world.ray.now - started_at < 500, "still waiting for answers"
        for handle, seconds in delays.items():
            if world.ray.now - started_at > seconds and handle.pings and not handle.is_responsive:
                handle.pings[-1].is_done = handle.is_responsive = True
        return wait(refs, **given)

    engine_supervisor.ray.wait = delayed_wait
    assert not world.supervisor.attribute_failure(WeightSyncError("nothing from rank 2 within 8 s"))
    assert 60 < world.ray.now - started_at < 120


def test_wait_ready_blocks_until_an_engine_has_restarted(make_world):
    world = make_world(1)
    kill(world.engines.actors[0])
    world.supervisor.poll()
    start = world.engines.start

    def start_at_once(replica):
        ref = start(replica)
        ref.is_done = True
        return ref

    world.engines.start = start_at_once
    assert world.supervisor.wait_ready() == [0]
    assert (world.supervisor.serving, world.resynced) == ([], [])
    world.supervisor.mark_serving([0])
    assert world.supervisor.serving == [0]


def test_engine_error_with_log_tail_is_raised_if_restarts_are_disabled(make_world):
    world = make_world(max_restarts=0)
    kill(world.engines.actors[0])
    with expect_error(LostEngineError, "SIGKILL", "x.log"):
        world.supervisor.poll()


def test_engine_of_a_lost_node_is_not_restarted(make_world):
    world = make_world(count=2)
    world.engines.lost_nodes.add(0)
    kill(world.engines.actors[0])
    world.pass_time(10)
    assert world.supervisor.serving == world.supervisor.ready == [1]
    assert world.messages[-1] == "a node of engine 0 is lost; the run continues without this engine"
    assert world.engines.starting == []
    world.engines.lost_nodes.add(1)
    kill(world.engines.actors[1])
    with expect_error(WorkerError, "engines", "nodes"):
        world.pass_time(10)


@pytest.mark.parametrize("is_responsive", [True, False])
def test_processes_of_an_engine_on_all_its_nodes_are_stopped_before_it_is_restarted(make_world, is_responsive):
    world = make_world(1, backoff_seconds=0.1)
    engine, node = world.engines.actors[0], FakeHandle(is_responsive)
    world.engines.other_nodes, lost_at = [node], world.ray.now
    kill(engine)
    world.supervisor.poll()
    assert world.ray.now == lost_at  # the controller's thread does not wait for a process that does not answer
    assert (engine.was_killed, node.was_killed) == (is_responsive, is_responsive)
    world.pass_time(STOP_TIMEOUT_SECONDS)
    assert (engine.was_killed, node.was_killed) == (True, True)
    while not world.engines.starting:
        world.pass_time(1)
    assert (world.ray.now - lost_at >= KILL_WAIT_SECONDS) != is_responsive


NUM_MANY = 1000


def count_calls(world, act):
    """Return the number of calls of Ray that `act` makes, and the seconds that it waits."""
    calls, begun = world.ray.num_calls, world.ray.now
    act()
    return world.ray.num_calls - calls, world.ray.now - begun


def test_a_poll_of_many_engines_is_one_call(make_world):
    world = make_world(NUM_MANY)
    assert count_calls(world, world.supervisor.poll) == (1, 0.0)
    world.pass_time(15)  # all have been pinged, and answer
    assert all(handle.pings for handle in world.engines.actors)
    assert count_calls(world, world.supervisor.poll) == (2, 0.0)


def test_a_failed_push_blocks_for_the_same_time_with_any_number_of_engines(make_world):
    for count in (1, 8, NUM_MANY):
        world = make_world(count)
        num_calls, seconds = count_calls(
            world, lambda world=world: world.supervisor.attribute_failure(WorkerError("trainer rank 1 died"))
        )
        assert num_calls < 20
        assert seconds <= GRACE_SECONDS


def test_pings_of_many_engines_are_waited_for_together(make_world):
    world = make_world(NUM_MANY, engine_stall_seconds=20)
    late = WeightSyncError("nothing from rank 2 within 8 s")
    assert not world.supervisor.attribute_failure(late)
    assert {len(handle.pings) for handle in world.engines.actors} == {1}
    for handle in world.engines.actors:
        handle.is_responsive = False
    num_calls, seconds = count_calls(world, lambda: world.supervisor.attribute_failure(late))
    assert num_calls < 200
    assert 20 < seconds < 20 + GRACE_SECONDS + GATHER_SECONDS + 5
    assert (world.supervisor.ready, world.supervisor.starting) == ([], [])
    assert len(world.messages) == 1
    assert world.messages[0].startswith(
        "1000 engines (engine 0, engine 1, engine 2 and 997 others) were lost "
        "(engine 0 has not answered a ping for 20 s (recovery.engine_stall_seconds)); restarting them (restarts 1 to"
    )


def test_engines_lost_together_are_restarted_and_resynced_together(make_world):
    world = make_world(NUM_MANY)
    lost = range(100, 140)
    left = list(lost)

    def die():
        """The deaths are reported one after the other, as a node's are."""
        if left:
            kill(world.engines.actors[left.pop(0)])

    die()
    world.ray.before_waiting = die
    wait = world.ray.wait

    def wait_shortly(refs, *, num_returns=1, timeout=None):
        return wait(refs, num_returns=num_returns, timeout=timeout and min(timeout, 0.01))

    world.ray.wait = wait_shortly
    assert world.supervisor.attribute_failure(WorkerError("begin_weights: ..."))
    assert world.supervisor.ready == [index for index in range(NUM_MANY) if index not in lost]
    assert world.supervisor.starting == list(lost)
    assert len(world.engines.starting) == 40
    resyncs = []
    world.supervisor.restore = lambda *replicas: resyncs.append(replicas) or replicas
    for ref in world.engines.starting:
        ref.end()
    world.messages.clear()
    world.supervisor.poll()
    assert resyncs == [tuple(lost)]
    assert len(world.supervisor.serving) == NUM_MANY
    (message,) = world.messages
    assert message.startswith("40 engines (engine 100, engine 101, engine 102 and 37 others) are serving again, ")


def test_losses_of_one_round_are_reported_in_one_line(make_world):
    world = make_world(NUM_MANY)
    world.engines.lost_nodes = set(range(8, 16))
    for index in range(40):
        kill(world.engines.actors[index], LostEngineError("another reason") if index == 20 else DIED)
    num_calls, seconds = count_calls(world, world.supervisor.poll)
    assert num_calls < 120
    assert seconds == pytest.approx(GATHER_SECONDS)
    assert world.supervisor.starting == [*range(8), *range(16, 40)]
    assert world.messages == [
        "40 engines (engine 0, engine 1, engine 2 and 37 others) were lost (the engine's scheduler process of TP rank "
        "0 was ended by SIGKILL; 1 for other reasons); restarting them (restarts 1 to 40 of 20000)",
        "a node of 8 engines (engine 8, engine 9, engine 10 and 5 others) is lost; the run continues without them",
    ]
