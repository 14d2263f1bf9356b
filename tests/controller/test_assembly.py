"""Which lost machines a trainer waits for; the cluster is stood in for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import assembly
from megarl.controller.assembly import Fleet
from megarl.errors import ConfigError, LostNodeError, WorkerError
from megarl.placement.pool import Slot, SlotPool
from tests.run.finished_groups import run_config

APART = {"pools": {"engines": {"nodes": 2}}, "rollout": {"pool": "engines"}}


def refuse(*_: Any) -> Any:
    raise ConfigError("too few")


def lacking(
    lost: set[str],
    patch: pytest.MonkeyPatch,
    placement: dict[str, Any],
    *,
    is_up: bool = True,
    reserve: Callable[..., Any] = refuse,
    wait_seconds: float = 0.0,
) -> bool:
    """Whether a run ends that has a trainer on machine `a`, engines on `b` and `c`, and has lost some of these."""
    there = {"a", "b", "c"} - lost
    patch.setattr(assembly, "cluster_nodes", lambda: [SimpleNamespace(id=node, name=node) for node in sorted(there)])
    patch.setattr(assembly, "remove_placement_group", lambda _: None)
    patch.setattr(assembly, "reserve_pools", reserve)
    patch.setattr(assembly, "LOOK_SECONDS", 0.0)
    found: Any = Fleet.__new__(Fleet)
    found._config = run_config({"type": "grpo"}, placement=placement, recovery={"node_wait_seconds": wait_seconds})
    found._say = lambda text: None
    found._nodes = {node: f"machine {node}" for node in "abc"}
    slots = {"main": "a", "engines": "bc"} if "pools" in placement else {"main": "abc"}
    found._pools = {
        name: SlotPool(None, tuple(Slot(i, 1.0, 0.0, node, None) for i, node in enumerate(nodes)), "cpu")
        for name, nodes in slots.items()
    }
    engines = SimpleNamespace(
        servers=[(0,), (1,)], has_machine=lambda replica: "bc"[replica] in there, shutdown=lambda: None, actors=dict
    )
    found._rollout = (engines, SimpleNamespace(actors=dict)) if is_up else None
    try:
        found.replace_nodes()
    except LostNodeError:
        return True
    return False


def test_a_machine_that_engines_alone_had_slots_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not lacking(set(), monkeypatch, APART)
    assert not lacking({"b"}, monkeypatch, APART)
    assert not lacking({"c"}, monkeypatch, APART)


@pytest.mark.parametrize("lost", [{"a"}, {"a", "b"}, {"b", "c"}])
def test_one_is_without_which_no_model_trains_or_no_engine_is_left(
    lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lacking(lost, monkeypatch, APART)


def test_engines_that_have_yet_to_start_need_all_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking({"b"}, monkeypatch, APART, is_up=False)


def test_machines_that_engines_share_with_the_trainer_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking({"b"}, monkeypatch, {"nodes": 3})


def test_a_machine_that_is_lost_again_as_it_has_come_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between being counted and being reserved."""
    failures = [ConfigError("too few"), WorkerError("not granted"), ConfigError("too few")]
    devices: list[str] = []

    def reserve(placement: Any, _: Any) -> Any:
        devices.append(placement.device)
        if failures:
            raise failures.pop(0)
        return {"main": SlotPool(None, (Slot(0, 1.0, 0.0, "b", None),), "cpu")}

    assert not lacking({"a"}, monkeypatch, {"nodes": 3}, reserve=reserve, wait_seconds=60.0)
    assert devices == ["cpu"] * 4
