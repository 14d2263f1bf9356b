"""Which lost nodes a run waits for; with a fake cluster."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import assembly
from megarl.controller.assembly import RunAssembly
from megarl.errors import ConfigError, LostNodeError, WorkerError
from megarl.placement.pool import Slot, SlotPool
from tests.run.finished_groups import run_config
from tests.time_limits import UNREACHED_SECONDS

DISAGGREGATED = {"pools": {"engines": {"nodes": 2}}, "rollout": {"pool": "engines"}}


def fail_to_reserve(*_: Any) -> Any:
    raise ConfigError("too few")


def aborts(
    lost: set[str],
    patch: pytest.MonkeyPatch,
    placement: dict[str, Any],
    *,
    is_up: bool = True,
    reserve: Callable[..., Any] = fail_to_reserve,
    wait_seconds: float = 0.0,
) -> bool:
    """Whether a run with a trainer on node `a` and engines on `b` and `c` aborts after the nodes in `lost` are lost."""
    there = {"a", "b", "c"} - lost
    patch.setattr(assembly, "cluster_nodes", lambda: [SimpleNamespace(id=node, name=node) for node in sorted(there)])
    patch.setattr(assembly, "remove_placement_group", lambda _: None)
    patch.setattr(assembly, "reserve_pools", reserve)
    patch.setattr(assembly, "NODE_POLL_SECONDS", 0.0)
    found: Any = RunAssembly.__new__(RunAssembly)
    found._config = run_config({"type": "grpo"}, placement=placement, recovery={"node_wait_seconds": wait_seconds})
    found._notify = lambda text: None
    found._nodes = {node: f"node {node}" for node in "abc"}
    slots = {"main": "a", "engines": "bc"} if "pools" in placement else {"main": "abc"}
    found._pools = {
        name: SlotPool(None, tuple(Slot(i, 1.0, 0.0, node, None) for i, node in enumerate(nodes)), "cpu")
        for name, nodes in slots.items()
    }
    engines = SimpleNamespace(
        engine_slots=[(0,), (1,)],
        has_live_node=lambda replica: "bc"[replica] in there,
        shutdown=lambda: None,
        actors=dict,
    )
    found._rollout = (engines, SimpleNamespace(actors=dict, shutdown=lambda: None)) if is_up else None
    try:
        found.replace_nodes()
    except LostNodeError:
        return True
    return False


@pytest.mark.parametrize(
    ("lost", "is_waited_for"),
    [("", False), ("b", False), ("c", False), ("a", True), ("ab", True), ("bc", True)],
)
def test_a_lost_node_is_waited_for_if_it_had_model_slots_or_the_last_engine(
    lost: str, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert aborts(set(lost), monkeypatch, DISAGGREGATED) == is_waited_for


def test_nodes_of_engines_that_have_not_started_or_share_them_with_the_trainer_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert aborts({"b"}, monkeypatch, DISAGGREGATED, is_up=False)
    assert aborts({"b"}, monkeypatch, {"nodes": 3})


def test_a_replacement_node_lost_before_its_slots_are_reserved_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is lost after it was counted and before its placement group is granted."""
    failures = [ConfigError("too few"), WorkerError("not granted"), ConfigError("too few")]
    devices: list[str] = []

    def reserve(placement: Any, _: Any) -> Any:
        devices.append(placement.device)
        if failures:
            raise failures.pop(0)
        return {"main": SlotPool(None, (Slot(0, 1.0, 0.0, "b", None),), "cpu")}

    assert not aborts({"a"}, monkeypatch, {"nodes": 3}, reserve=reserve, wait_seconds=UNREACHED_SECONDS)
    assert devices == ["cpu"] * 4
