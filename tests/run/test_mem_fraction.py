"""The fraction of device memory that a run gives to engines on the trainer's GPUs; on a pretended CUDA platform."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.reshard.published import QWEN3_8B
from megarl.config import RunConfig
from megarl.controller.assembly import RunAssembly
from megarl.device_memory import gpu_demand
from megarl.device_memory.gpu_demand import gpu_demands
from megarl.device_memory.gpus import GIB, USABLE_FRACTION, gpu_memory
from megarl.errors import ConfigError
from megarl.groups.trainer_group import read_gpu_bytes
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.runtime import platform
from megarl.run.mem_fraction import choose_mem_fraction, with_fraction
from megarl.run.step_ledger import peak, step_ledger
from tests.run.finished_groups import run_config

H100 = gpu_memory("h100-80")


@pytest.fixture(autouse=True)
def qwen3_8b(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_architecture(QWEN3_8B, origin="")
    monkeypatch.setattr(gpu_demand, "load_architecture_and_dtype", lambda path, **_: (model, "bfloat16"))
    monkeypatch.setattr(gpu_demand, "model_head", lambda path: "lm")
    monkeypatch.setattr(gpu_demand, "read_json_object", lambda path: QWEN3_8B)


def make_config(**sections: Any) -> RunConfig:
    placement = {"slots_per_node": 8, "device": "cuda"}
    return run_config({"type": "grpo"}, model={"path": "model"}, placement=placement, **sections)


def choose(config: RunConfig, gpu_bytes: list[int] | None) -> tuple[float | None, list[str]]:
    """Return what a run chooses for GPUs of these sizes, and what it tells the user."""
    assembly, messages = RunAssembly.__new__(RunAssembly), list[str]()
    assembly._config = config
    assembly._notify = messages.append  # type: ignore[method-assign]
    found: Any = None if gpu_bytes is None else SimpleNamespace(result=lambda timeout: gpu_bytes)
    return assembly._choose_mem_fraction(found), messages


def test_a_run_sets_the_largest_fraction_with_which_all_phases_fit() -> None:
    config = make_config(trainer={"recompute": {"granularity": "full"}}, rollout={"replicas": 8})
    value, messages = choose(config, [H100, 2 * H100])
    assert value is not None
    assert messages == [f"engines: largest mem_fraction that fits all phases {value:.3f}"]
    (demand,) = gpu_demands(config, H100)
    fraction = choose_mem_fraction(config, [demand], H100)
    assert fraction.value == value  # as `megarl check --gpu` prints it
    assert 0.95 * USABLE_FRACTION * H100 < peak(step_ledger(*with_fraction(demand, fraction, H100))) <= H100


def test_the_users_fraction_and_engines_without_shared_gpus_are_left_alone() -> None:
    chosen = make_config(rollout={"engine": {"mem_fraction": 0.4}})
    assert choose(chosen, [H100]) == (0.4, ["engines: rollout.engine.mem_fraction 0.400"])
    assert choose(chosen, None) == (0.4, [])
    assert choose(make_config(), None) == (None, [])  # on CPU, and on GPUs of their own


def test_nothing_left_for_the_cache_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        choose(make_config(), [gpu_memory("a100-40")])
    found = re.fullmatch(
        r"rollout\.engine\.mem_fraction: no memory is left for the KV cache on GPU 0 of pool main: training needs "
        r"(.*) = ([\d.]+) GiB of 0\.95 \* 40\.0 = 38\.0 GiB; `megarl check --gpu` prints all phases, .*",
        str(caught.value),
    )
    assert found is not None
    parts = [float(part) for part in re.findall(r" ([\d.]+)(?: \+|$)", found[1])]
    assert sum(parts) == pytest.approx(float(found[2]), abs=0.3)
    assert float(found[2]) > 38.0


def test_the_size_of_the_gpu_comes_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    sizes = {3: 80 * GIB}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=sizes[device.index])
    )
    assert read_gpu_bytes() == 80 * GIB
