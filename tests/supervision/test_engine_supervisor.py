"""Engines that die or stand still, with a clock and a Ray that the test moves."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from megarl.config.recovery import RecoveryConfig
from megarl.errors import LostEngineError, MegarlError, RestartLimitError, WeightSyncError, WorkerError
from megarl.supervision import engine_supervisor
from megarl.supervision.engine_supervisor import KILL_WAIT_SECONDS, EngineSupervisor
from megarl.supervision.restart_budget import RestartBudget

DIED = LostEngineError("the engine's scheduler process of TP rank 0 was ended by SIGKILL; the end of x.log:\nlast")


@dataclass(eq=False)
class Ref:
    is_done: bool = False
    value: Any = None


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@dataclass(eq=False)
class Handle:
    """An engine's actor: beats are answered where `answers`, and so is `stop`."""

    answers: bool = True
    watch: Ref = field(default_factory=Ref)
    beats: list[Ref] = field(default_factory=list)
    was_killed: bool = False

    @property
    def invoke(self):
        return SimpleNamespace(remote=self._invoke)

    @property
    def stop(self):
        return SimpleNamespace(remote=lambda: Ref(self.answers))

    def _invoke(self, method):
        if method == "watch":
            return self.watch
        assert method == "ping"
        self.beats.append(Ref(self.answers))
        return self.beats[-1]


class Ray:
    """Refs are `Ref`s; waiting takes its time."""

    def __init__(self, clock):
        self.clock = clock

    def wait(self, refs, *, num_returns=1, timeout=None):
        done = [ref for ref in refs if ref.is_done][:num_returns]
        if len(done) < num_returns:
            self.clock.now += timeout
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref):
        assert ref.is_done
        if isinstance(ref.value, RayError):
            raise ref.value
        return ref.value

    def kill(self, handle):
        handle.was_killed = True


class Engines:
    def __init__(self, count):
        self.handles = [None] * count
        self.starting = []
        self.lost_machines = set()

    def has_live_node(self, replica):
        return replica not in self.lost_machines

    def name(self, replica):
        return f"engine {replica}"

    def handle(self, replica):
        return self.handles[replica]

    def start(self, replica):
        self.handles[replica] = Handle()
        self.starting.append(Ref())
        return self.starting[-1]


@dataclass
class World:
    clock: Clock
    engines: Engines
    supervisor: EngineSupervisor
    said: list[str]
    restored: list[int]

    def pass_time(self, seconds):
        for _ in range(round(seconds)):
            self.clock.now += 1.0
            self.supervisor.poll()


@pytest.fixture
def make(monkeypatch):
    def make(count=2, is_up=True, **recovery):
        clock, said, restored = Clock(), [], []
        monkeypatch.setattr(engine_supervisor, "time", clock)
        monkeypatch.setattr(engine_supervisor, "ray", Ray(clock))
        config = SimpleNamespace(
            recovery=RecoveryConfig(**recovery),
            rollout=SimpleNamespace(engine=SimpleNamespace(start_timeout_seconds=300.0)),
        )
        engines = Engines(count)
        found = EngineSupervisor(engines, count, config, RestartBudget(config.recovery, said.append))
        found.resync = restored.append
        found.start()
        if is_up:
            for ref in engines.starting:
                ref.is_done = True
            found.wait_started()
            engines.starting.clear()
        return World(clock, engines, found, said, restored)

    return make


def end(handle, error: MegarlError = DIED):
    handle.watch.is_done, handle.watch.value = True, error


def test_an_engine_that_died_gets_its_weights_before_it_serves(make):
    world = make()
    first = world.engines.handles[1]
    world.pass_time(100)
    assert world.supervisor.serving == world.supervisor.ready == [0, 1]
    end(first)
    world.supervisor.poll()
    assert first.was_killed
    assert world.supervisor.serving == [0]
    world.pass_time(20)
    (starting,) = world.engines.starting
    assert world.engines.handles[1] is not first
    assert (world.supervisor.ready, world.restored) == ([0], [])

    def resync(replica):
        assert (world.supervisor.serving, world.supervisor.ready) == ([0], [0, 1])
        world.restored.append(replica)

    world.supervisor.resync = resync
    starting.is_done = True
    world.supervisor.poll()
    assert (world.supervisor.serving, world.restored) == ([0, 1], [1])
    assert world.said == [
        "engine 1 was lost (the engine's scheduler process of TP rank 0 was ended by SIGKILL); restarting it (restart 1 of 20)",
        "engine 1 is serving again, 20.0 s after its loss was detected",
    ]


def test_an_engine_that_is_killed_while_it_starts_is_started_again(make):
    world = make(2, is_up=False)
    first, second = world.engines.starting
    second.is_done = True
    first.value, first.is_done = LostEngineError("the engine did not start: scheduler died"), True
    world.supervisor.poll()
    assert world.supervisor.ready == [1]
    world.engines.starting[-1].is_done = True
    world.supervisor.wait_started()
    assert world.supervisor.serving == [0, 1]
    assert world.said == [
        "engine 0 was lost (the engine did not start: scheduler died); restarting it (restart 1 of 20)"
    ]


def test_an_engine_that_fails_by_itself_at_its_first_start_would_fail_again(make):
    world = make(1, is_up=False)
    (ref,) = world.engines.starting
    ref.value, ref.is_done = WorkerError("the engine did not start: no such model"), True
    with pytest.raises(WorkerError, match="no such model"):
        world.supervisor.wait_started()
    assert world.said == []


def test_engines_that_are_shut_down_are_not_lost(make):
    world = make()
    world.supervisor.close()
    end(world.engines.handles[0], LostEngineError("the engine was shut down"))
    with pytest.raises(RestartLimitError, match="the engines were shut down"):
        world.supervisor.poll()
    assert world.said == []


def test_an_engine_that_answers_late_is_not_lost(make):
    world = make(1, engine_stall_seconds=20)
    handle = world.engines.handles[0]
    for _ in range(3):
        handle.answers = False
        world.pass_time(18)
        handle.beats[-1].is_done = handle.answers = True
        world.pass_time(2)
    assert world.said == []
    assert len(handle.beats) == 3


def test_an_engine_that_stands_still_is_lost_and_given_time_to_be_killed(make):
    world = make(1, engine_stall_seconds=20)
    handle = world.engines.handles[0]
    handle.answers = False
    while not handle.was_killed:
        assert not world.engines.starting
        world.pass_time(1)
    assert world.said[0].startswith("engine 0 was lost (engine 0 has not answered a ping for 20 s (recovery.engine_s")
    lost = world.clock.now
    while not world.engines.starting:
        world.pass_time(1)
    assert world.clock.now - lost >= KILL_WAIT_SECONDS - 3


def test_time_in_which_nobody_looked_is_not_held_against_an_engine(make):
    world = make(1, engine_stall_seconds=20)
    handle = world.engines.handles[0]
    handle.answers = False
    world.pass_time(8)
    world.clock.now += 1000  # training
    world.pass_time(2)
    assert (world.said, len(handle.beats)) == ([], 1)
    handle.beats[0].is_done = handle.answers = True
    world.pass_time(30)
    assert world.said == []


def test_a_start_that_fails_is_tried_again_later_and_given_up_at_last(make):
    world = make(1, max_identical_failures=3, backoff_seconds=4)
    end(world.engines.handles[0])
    world.pass_time(1)
    failure = WorkerError("the engine did not start: out of memory")
    for wait, count in ((4, 2), (8, 3)):
        world.engines.starting[-1].value, world.engines.starting[-1].is_done = failure, True
        world.supervisor.poll()
        assert world.said[-1].endswith(f"; restarting it in {wait} s (restart {count} of 20)")
        world.pass_time(wait - 1)
        assert len(world.engines.starting) == count - 1
        world.pass_time(1)
        assert len(world.engines.starting) == count
    world.engines.starting[-1].value, world.engines.starting[-1].is_done = failure, True
    with pytest.raises(WorkerError, match=r"engine 0 was lost 3 times for the same reason.*out of memory"):
        world.supervisor.poll()


def test_a_start_that_takes_too_long_failed(make):
    world = make(1)
    end(world.engines.handles[0])
    world.pass_time(302)
    assert world.said[-1].startswith(
        "engine 0 was lost (engine 0 did not start within 300 s (rollout.engine.start_timeout"
    )


def test_a_push_that_fails_is_an_engine_s_fault_only_if_one_is_lost(make):
    world = make()
    assert not world.supervisor.attribute_failure(WeightSyncError("trainer rank 1 is late"))
    assert not world.supervisor.attribute_failure(WorkerError("trainer rank 1 died"))
    end(world.engines.handles[1])
    assert world.supervisor.attribute_failure(WorkerError("begin_weights: ..."))
    assert world.supervisor.wait_ready() == [0]
    assert world.restored == []


def test_a_push_that_an_engine_holds_up_by_standing_still_is_its_fault(make):
    world = make(engine_stall_seconds=20)
    world.engines.handles[0].answers = False
    began = world.clock.now
    assert world.supervisor.attribute_failure(WeightSyncError("nothing from rank 2 within 8 s"))
    assert world.clock.now - began < 40
    assert world.supervisor.ready == [1]


def test_a_push_that_no_engine_holds_up_is_soon_known_not_to_be_its_fault_however_many_there_are(make):
    """While one is slow to answer, others are asked again: some are being asked at any time."""
    world = make(count=200, engine_stall_seconds=200)
    delays = {world.engines.handles[0]: 60} | dict.fromkeys(world.engines.handles[1::2], 5)
    for handle in delays:
        handle.answers = False
    began, wait = world.clock.now, engine_supervisor.ray.wait

    def waits(refs, **given):
        assert world.clock.now - began < 500, "it is still waited for"
        for handle, seconds in delays.items():
            if world.clock.now - began > seconds and handle.beats and not handle.answers:
                handle.beats[-1].is_done = handle.answers = True
        return wait(refs, **given)

    engine_supervisor.ray.wait = waits
    assert not world.supervisor.attribute_failure(WeightSyncError("nothing from rank 2 within 8 s"))
    assert 60 < world.clock.now - began < 120


def test_what_no_engine_is_up_for_waits(make):
    world = make(1)
    end(world.engines.handles[0])
    world.supervisor.poll()
    start = world.engines.start

    def quick(replica):
        ref = start(replica)
        ref.is_done = True
        return ref

    world.engines.start = quick
    assert world.supervisor.wait_ready() == [0]
    assert (world.supervisor.serving, world.restored) == ([], [])
    world.supervisor.mark_serving([0])
    assert world.supervisor.serving == [0]


def test_where_nothing_may_be_restarted_the_engine_s_last_words_are_the_error(make):
    world = make(max_restarts=0)
    end(world.engines.handles[0])
    with pytest.raises(LostEngineError, match=r"(?s)ended by SIGKILL; the end of x\.log:\nlast"):
        world.supervisor.poll()


def test_an_engine_whose_machine_is_lost_is_gone(make):
    world = make(count=2)
    world.engines.lost_machines.add(0)
    end(world.engines.handles[0])
    world.pass_time(10)
    assert world.supervisor.serving == world.supervisor.ready == [1]
    assert world.said[-1] == "the node of engine 0 is lost; the run continues without this engine"
    assert world.engines.starting == []
    world.engines.lost_machines.add(1)
    end(world.engines.handles[1])
    with pytest.raises(WorkerError, match=r"^the nodes of all engines are lost$"):
        world.pass_time(10)
