"""What the controller tells engines that share GPUs with the trainer, and asks all of them for; with fake processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.reshard.fake_ray import FakeRay, Serialized
from megarl.errors import WeightSyncError
from megarl.groups import engine_group
from megarl.groups.engine_group import EngineGroup, EngineHandles, StartedEngine
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

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.run = SimpleNamespace(remote=lambda function: calls.append(("run", function)))
        self.build = SimpleNamespace(remote=lambda factory, arguments, *_: calls.append(("build", arguments[0])))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(EngineGroup, "_create_actors", lambda self, by_node: [FakeProcess(calls)])
    monkeypatch.setattr(EngineGroup, "has_live_node", lambda self, replica: True)
    monkeypatch.setattr(engine_group, "make_engine_spec", lambda config, replica, device: SPEC)
    return calls


CONFIG = run_config({"type": "grpo"})
SPEC = EngineSpec(model_path="model", device="cuda", dtype="bfloat16", releases_memory=True)


def test_engines_import_then_start_and_allocate_after_resume(calls: list[tuple[str, Any]]) -> None:
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


def test_an_engine_restarted_while_the_trainer_has_the_memory_waits_for_it(calls: list[tuple[str, Any]]) -> None:
    group = EngineGroup(CONFIG, POOL, [(0,)], waits_for_memory=True)
    group.begin_start(0.7)
    group.resume(())
    group.start(0)
    group.release(())
    group.start(0)
    assert [argument.waits_for_memory for name, argument in calls if name == "build"] == [True, False, True]
    assert all(argument.mem_fraction == 0.7 for name, argument in calls if name == "build")


def test_engines_with_devices_of_their_own_start_at_once(calls: list[tuple[str, Any]]) -> None:
    EngineGroup(CONFIG, POOL, [(0,)])
    ((name, spec),) = calls
    assert (name, spec.waits_for_memory, spec.mem_fraction) == ("build", False, None)
    assert "mem_fraction_static" not in make_engine_arguments(spec)


SPECS = {"w": TensorSpec((8,), "float32")}


def needs_of(local: str) -> WeightNeeds:
    halves = [ShardPiece("w", (box,), local, ((0, 4),)) for box in ((0, 4), (4, 8))]
    return WeightNeeds(layouts=tuple(WeightLayout(SPECS, [piece]) for piece in halves), full_tensors=("w",))


def ask(locals_: list[str]) -> tuple[FakeRay, WeightNeeds]:
    """Return the needs of engines whose ranks hold `w` under these names."""

    def answer(actor: str, method: str, _: tuple[Any, ...]) -> Serialized:
        needs = needs_of(locals_[int(actor.split()[1])])
        return Serialized.of(needs if method == "weight_needs" else needs.digest)

    ray = FakeRay(answer)
    engines = [StartedEngine(ray.actor(f"engine {i}"), f"engine {i}") for i in range(len(locals_))]
    with ray.installed():
        return ray, EngineHandles(engines, [(0, 1)] * len(engines), POOL, HANG_SECONDS).weight_needs()


def test_one_engine_sends_its_layouts_and_the_others_a_digest() -> None:
    ray, needs = ask(["w"] * 3)
    assert needs == needs_of("w")
    assert [method for _, method in ray.sent] == ["weight_needs", "weight_needs_digest", "weight_needs_digest"]
    with pytest.raises(WeightSyncError, match="engine 2 does not hold the weights in the layout of engine 0"):
        ask(["w", "w", "fused"])
