"""What the controller asks engines for: one sends its layouts, the others a digest."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reshard.fake_ray import FakeRay, Serialized
from megarl.errors import WeightSyncError
from megarl.groups.engine_group import EngineHandles, StartedEngine
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, WeightNeeds

SPECS = {"w": TensorSpec((8,), "float32")}


def needs_of(local: str) -> WeightNeeds:
    halves = [ShardPiece("w", (box,), local, ((0, 4),)) for box in ((0, 4), (4, 8))]
    return WeightNeeds(layouts=tuple(WeightLayout(SPECS, [piece]) for piece in halves), full_tensors=("w",))


def ask(locals_: list[str]) -> tuple[FakeRay, WeightNeeds]:
    """Return the needs of engines whose ranks hold `w` under these names."""

    def answer(actor: str, method: str, _: tuple[Any, ...]) -> Serialized:
        needs = needs_of(locals_[int(actor.split()[1])])
        return Serialized.of(needs if method == "weight_needs" else needs.digest)

    ray, pool = FakeRay(answer), Any
    engines = [StartedEngine(ray.actor(f"engine {i}"), f"engine {i}") for i in range(len(locals_))]
    with ray.installed():
        return ray, EngineHandles(engines, [(0, 1)] * len(engines), pool, 9.0).weight_needs()  # type: ignore[arg-type]


def test_one_engine_sends_its_layouts_and_the_others_a_digest() -> None:
    ray, needs = ask(["w"] * 3)
    assert needs == needs_of("w")
    assert [method for _, method in ray.sent] == ["weight_needs", "weight_needs_digest", "weight_needs_digest"]


def test_an_engine_with_another_layout_is_named() -> None:
    with pytest.raises(WeightSyncError, match="engine 2 does not hold the weights in the layout of engine 0"):
        ask(["w", "w", "fused"])
