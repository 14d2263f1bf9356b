from __future__ import annotations

import pytest
import ray
from ray.util import remove_placement_group

from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError, WorkerError
from megarl.placement import pool
from megarl.placement.pool import reserve, resolve_device, start_cluster

pytestmark = pytest.mark.usefixtures("cluster")


def test_slots_are_bundles_in_order_on_this_machine() -> None:
    slots = reserve(PlacementConfig(slots_per_node=3))
    try:
        assert slots.device == "cpu"
        assert [slot.bundle for slot in slots.slots] == [0, 1, 2]
        assert {slot.node for slot in slots.slots} == {ray.get_runtime_context().get_node_id()}
        assert {(slot.cpus, slot.gpus, slot.gpu_id) for slot in slots.slots} == {(1.0, 0.0, None)}
    finally:
        remove_placement_group(slots.group)


def test_more_slots_than_the_cluster_has_are_waited_for_and_given_up() -> None:
    config = PlacementConfig(slots_per_node=500, start_timeout_seconds=0.5)
    with pytest.raises(WorkerError, match=r"^placement needs 500 slots of .* within 0\.5 s; it has .*'CPU': 8"):
        reserve(config)


@pytest.mark.parametrize(
    ("device", "gpus", "want"),
    [("auto", 0, "cpu"), ("auto", 1, "cpu"), ("auto", 2, "cuda"), ("cuda", 2, "cuda"), ("cpu", 8, "cpu")],
)
def test_the_device_is_what_the_cluster_has_enough_of(
    device: str, gpus: int, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool.ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": float(gpus)})
    config = PlacementConfig.model_validate({"slots_per_node": 2, "device": device})
    assert resolve_device(config) == want


def test_cuda_without_enough_gpus_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"^placement\.device: cuda needs 2 GPUs in the cluster, got 0$"):
        resolve_device(PlacementConfig(slots_per_node=2, device="cuda"))


def test_an_address_where_nobody_answers_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(pool.ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS=127\.0\.0\.1:1: no Ray cluster answers there: refused$"):
        start_cluster(PlacementConfig())
