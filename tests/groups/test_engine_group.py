"""Calls of engines, with fake processes: start, needs, errors, and retries of lost answers."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError

from benchmarks.reshard.fake_ray import FakeRay, Serialized
from megarl.errors import LostEngineError, WeightSyncError, WorkerError
from megarl.groups import engine_group, remote_engine
from megarl.groups.engine_group import EngineGroup, EngineHandles, StartedEngine
from megarl.groups.remote_engine import EngineSink, RemoteEngine
from megarl.placement.pool import Slot, SlotPool
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, WeightNeeds
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.server_args import make_engine_arguments
from megarl.rollout.sglang.start_gate import open_process_gate
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
    monkeypatch.setattr(EngineGroup, "_create_actors", lambda self, by_node: [FakeProcess(calls)])
    monkeypatch.setattr(EngineGroup, "has_live_node", lambda self, replica: True)
    monkeypatch.setattr(engine_group, "make_engine_spec", lambda config, replica, device: SPEC)
    return calls


CONFIG = run_config({"type": "grpo"})
SPEC = EngineSpec(model_path="model", device="cuda", dtype="bfloat16", releases_memory=True)


def test_engines_import_then_start_and_allocate_after_resume(calls):
    group = EngineGroup(CONFIG, POOL, [(0,), (1,)], waits_for_memory=True)
    assert calls == [("run", engine_group._import_engine)] * 2
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
    with pytest.raises(WeightSyncError, match="engine 2 does not hold the weights in the layout of engine 0"):
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
    handle = FakeActor(*lost_answer_errors(), ["completion"])
    assert asyncio.run(RemoteEngine(handle, "engine 1").generate_many([])) == ["completion"]
    assert handle.left == []
    handle = FakeActor(*lost_answer_errors(), ActorDiedError())
    with pytest.raises(LostEngineError, match="generate_many: engine 1 died"):
        asyncio.run(RemoteEngine(handle, "engine 1").generate_many([]))
