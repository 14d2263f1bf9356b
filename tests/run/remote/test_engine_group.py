"""Calls of engines, with fake processes: start, needs, errors, and retries of lost answers."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError

from benchmarks.reshard.fake_ray import FakeRay, Serialized
from megarl.cluster.placement import assign
from megarl.cluster.placement.pool import Slot, SlotPool
from megarl.cluster.workers import failures
from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.scheduler_process import open_process_gate
from megarl.engines.sglang.server_args import make_engine_arguments
from megarl.errors import LostEngineError, WeightSyncError, WorkerError
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, WeightNeeds
from megarl.run.remote import engine_group, remote_engine
from megarl.run.remote.engine_group import EngineGroup, EngineHandles, StartedEngine
from megarl.run.remote.remote_engine import EngineSink, RemoteEngine
from tests import fake_ray
from tests.errors import expect_error
from tests.run.finished_groups import run_config
from tests.time_limits import HANG_SECONDS

POOL = SlotPool(None, tuple(Slot(i, 1.0, 1.0, "a", i) for i in range(2)), "cuda")


class FakeProcess:
    """Records the calls of one engine's process."""

    def __init__(self, calls):
        self.run = SimpleNamespace(remote=lambda function: calls.append(("run", function)))
        self.build = SimpleNamespace(remote=lambda factory, arguments, *_: calls.append(("build", arguments[0])))


@pytest.fixture
def calls(monkeypatch):
    calls = []
    monkeypatch.setattr(EngineGroup, "create_actors", lambda self, by_node: [FakeProcess(calls)])
    monkeypatch.setattr(EngineGroup, "has_live_node", lambda self, replica: True)
    monkeypatch.setattr(engine_group, "make_engine_spec", lambda config, replica, device: SPEC)
    return calls


CONFIG = run_config({"type": "grpo"})
SPEC = EngineSpec(model_path="model", device="cuda", dtype="bfloat16", releases_memory=True)


def test_engines_import_then_start_and_allocate_after_resume(calls):
    group = EngineGroup(CONFIG, POOL, [(0,), (1,)], waits_for_memory=True)
    assert calls == [("run", engine_group.import_engine)] * 2
    group.begin_start(0.7)
    specs = [argument for name, argument in calls[2:] if name == "build"]
    assert [(spec.waits_for_memory, spec.mem_fraction) for spec in specs] == [(True, 0.7)] * 2
    arguments = make_engine_arguments(specs[0])
    assert arguments["mem_fraction_static"] == 0.7
    assert arguments["enable_memory_saver"] is True
    group.resume(())
    assert calls[4:] == [("run", open_process_gate)] * 2
    assert group.may_allocate()


def test_an_engine_restarted_while_the_trainer_has_the_memory_waits_for_it(calls):
    group = EngineGroup(CONFIG, POOL, [(0,)], waits_for_memory=True)
    group.begin_start(0.7)
    group.resume(())
    group.start(0)
    group.release(())
    group.start(0)
    assert [argument.waits_for_memory for name, argument in calls if name == "build"] == [True, False, True]
    assert all(argument.mem_fraction == 0.7 for name, argument in calls if name == "build")


def test_engines_with_devices_of_their_own_start_at_once(calls):
    EngineGroup(CONFIG, POOL, [(0,)])
    ((name, spec),) = calls
    assert (name, spec.waits_for_memory, spec.mem_fraction) == ("build", False, None)
    assert "mem_fraction_static" not in make_engine_arguments(spec)


def test_nodes_are_asked_for_once_for_all_engines_that_start_or_are_lost_together(calls, monkeypatch):
    monkeypatch.undo()  # of `has_live_node`
    monkeypatch.setattr(EngineGroup, "create_actors", lambda self, by_node: [FakeProcess(calls)])
    monkeypatch.setattr(engine_group, "make_engine_spec", lambda config, replica, device: SPEC)
    asked, alive, clock = [], {"a", "b"}, SimpleNamespace(monotonic=lambda: len(asked) and clock.now, now=0.0)

    def cluster_nodes():
        asked.append(clock.now)
        return [SimpleNamespace(id=node) for node in alive]

    monkeypatch.setattr(assign, "cluster_nodes", cluster_nodes)
    monkeypatch.setattr(assign, "time", clock)
    slots = tuple(Slot(i, 1.0, 1.0, "ab"[i % 2], i) for i in range(400))
    group = EngineGroup(CONFIG, SlotPool(None, slots, "cuda"), [(i,) for i in range(400)])
    assert len(calls) == 400
    assert len(asked) == 1
    alive.discard("b")
    clock.now += 1.0
    assert [group.has_live_node(replica) for replica in range(400)] == [True, False] * 200
    assert len(asked) == 2


def test_handles_for_workers_stay_the_same_objects_until_an_engine_restarts(calls):
    group = EngineGroup(CONFIG, POOL, [(0,), (1,)])
    for replica in group.supervisor.replicas:
        replica.state = "serving"
    before = group.remote_engines()
    assert [engine.name for engine in before] == ["engine 0", "engine 1"]
    assert all(a is b for a, b in zip(before, group.remote_engines(), strict=True))
    group.start(1)
    group.supervisor.replicas[0].state = "starting"
    lost, restarted = group.remote_engines()
    assert lost is None
    assert restarted is not before[1]
    assert restarted.handle is group.engines[1].handle


def test_engines_are_asked_together_for_their_first_completion(calls, monkeypatch):
    group = EngineGroup(CONFIG, POOL, [(0,), (1,)])
    ray = fake_ray.FakeRay()
    for module in (failures, engine_group):
        monkeypatch.setattr(module, "time", ray)
    monkeypatch.setattr(failures, "ray", ray)
    answers = [fake_ray.Ref() for _ in range(4)]
    answers[1].end(ActorDiedError())
    answers[2].end(90.0)
    answers[3].end(None)
    group.engines = [
        StartedEngine(SimpleNamespace(invoke=SimpleNamespace(remote=lambda _, ref=ref: ref)), "engine")
        for ref in answers
    ]
    group.supervisor = SimpleNamespace(serving=range(4))
    assert group.first_completion_time() == 90.0
    assert ray.now == fake_ray.FakeRay().now + CONFIG.weight_sync.timeout_seconds  # one silent engine, one time limit
    group.supervisor.serving = [1, 3]
    assert group.first_completion_time() == ray.now


SPECS = {"w": TensorSpec((8,), "float32")}


def needs_of(local):
    halves = [ShardPiece("w", (box,), local, ((0, 4),)) for box in ((0, 4), (4, 8))]
    return WeightNeeds(layouts=tuple(WeightLayout(SPECS, [piece]) for piece in halves), full_tensors=("w",))


def ask(locals_):
    """Return the needs of engines whose ranks hold `w` under these names."""

    def answer(actor, method, _):
        needs = needs_of(locals_[int(actor.split()[1])])
        return Serialized.of(needs if method == "weight_needs" else needs.digest)

    ray = FakeRay(answer)
    engines = [StartedEngine(ray.actor(f"engine {i}"), f"engine {i}") for i in range(len(locals_))]
    with ray.installed():
        return ray, EngineHandles(engines, [(0, 1)] * len(engines), POOL, HANG_SECONDS).weight_needs()


def test_one_engine_sends_its_layouts_and_the_others_a_digest():
    ray, needs = ask(["w"] * 3)
    assert needs == needs_of("w")
    assert [method for _, method in ray.sent] == ["weight_needs", "weight_needs_digest", "weight_needs_digest"]
    with expect_error(WeightSyncError, "2", "0", "weights", "engine"):
        ask(["w", "w", "fused"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WeightSyncError("norm is no parameter"), "engine 1: norm is no parameter"),
        (WorkerError("it died"), "engine 1 did not load a bucket of weights: it died"),
    ],
)
def test_sink_errors_name_the_engine(error, message, monkeypatch):
    def fail(refs, **_):
        assert refs == ["ref"]
        raise error

    monkeypatch.setattr(remote_engine, "wait_all", fail)
    handle = SimpleNamespace(invoke=SimpleNamespace(remote=lambda *_: "ref"))
    wait = EngineSink(handle, "engine 1", 1.0).load(None)
    with pytest.raises(WeightSyncError) as raised:
        wait()
    assert str(raised.value) == message
    assert raised.value.__cause__ is error


def ended_future(answer):
    """Return a future with this result, or with this exception of Ray."""
    future = Future()
    if isinstance(answer, RayError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


class FakeActor:
    """An actor that answers each call with the next value or Ray error."""

    def __init__(self, *answers):
        self.left, self.invoke = list(answers), SimpleNamespace(remote=self._invoke)

    def _invoke(self, *_):
        future = ended_future(self.left.pop(0))
        return SimpleNamespace(future=lambda: future)


def lost_answer_errors():
    return [ActorUnavailableError("the connection was reset", b"x" * 16), ObjectLostError("0" * 56, None, "")]


def test_call_is_retried_if_the_answer_was_lost_but_not_on_a_dead_engine(monkeypatch):
    monkeypatch.setattr(remote_engine, "RETRY_SECONDS", 0.0)
    handle = FakeActor(*lost_answer_errors(), {"1": "tokens"})
    assert asyncio.run(RemoteEngine(handle, "engine 1").partial_outputs({"1": 0})) == {"1": "tokens"}
    assert handle.left == []
    handle = FakeActor(*lost_answer_errors(), ActorDiedError())
    with expect_error(LostEngineError, "partial_outputs", "1"):
        asyncio.run(RemoteEngine(handle, "engine 1").partial_outputs({}))


@pytest.mark.parametrize("explains", [True, False])
def test_requests_are_aborted_on_the_engines_that_serve_although_one_is_lost(calls, monkeypatch, explains):
    group = EngineGroup(CONFIG, POOL, [(0,), (1,)])
    group.abort_all()  # none serves yet
    serving, asked = [0, 1], []

    def attribute_failure(error):
        serving.remove(1)
        return explains

    group.supervisor = SimpleNamespace(serving=serving, attribute_failure=attribute_failure)

    def call(handles, method, *arguments):
        asked.append((method, len(handles.engines), arguments))
        if len(handles.engines) == 2:
            raise WorkerError("engine 1 died")

    monkeypatch.setattr(EngineHandles, "call", call)
    if explains:
        group.abort_all()
        assert asked == [("abort_all", 2, ()), ("abort_all", 1, ())]
    else:
        with expect_error(WorkerError, "1", "engine"):
            group.abort_all()
