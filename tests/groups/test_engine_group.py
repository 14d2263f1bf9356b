"""Engines that share GPUs with the trainer: what their processes are told, in which order; with fake processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.groups import engine_group
from megarl.groups.engine_group import EngineGroup
from megarl.placement.pool import Slot, SlotPool
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.server_args import make_engine_arguments
from megarl.rollout.sglang.start_gate import open_process_gate
from tests.run.finished_groups import run_config

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


SPEC = EngineSpec(model_path="model", device="cuda", dtype="bfloat16", releases_memory=True)


def test_engines_import_then_start_and_allocate_after_resume(calls: list[tuple[str, Any]]) -> None:
    group = EngineGroup(run_config({"type": "grpo"}), POOL, [(0,), (1,)], waits_for_memory=True)
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
    group = EngineGroup(run_config({"type": "grpo"}), POOL, [(0,)], waits_for_memory=True)
    group.begin_start(0.7)
    group.resume(())
    group.start(0)
    group.release(())
    group.start(0)
    assert [argument.waits_for_memory for name, argument in calls if name == "build"] == [True, False, True]
    assert all(argument.mem_fraction == 0.7 for name, argument in calls if name == "build")


def test_engines_with_devices_of_their_own_start_at_once(calls: list[tuple[str, Any]]) -> None:
    EngineGroup(run_config({"type": "grpo"}), POOL, [(0,)])
    ((name, spec),) = calls
    assert (name, spec.waits_for_memory, spec.mem_fraction) == ("build", False, None)
    assert "mem_fraction_static" not in make_engine_arguments(spec)
