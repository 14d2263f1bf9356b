"""The memory of a step, driven by the class that moves it in a run: order, peaks, and the KV cache that fits.

The fraction of device memory that a run gives to engines on the trainer's GPUs is chosen on a pretended CUDA platform.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, override

import pytest
import torch

from benchmarks.reshard.published import QWEN3_8B
from megarl.config import RunConfig
from megarl.config.trainer import OffloadConfig
from megarl.controller.recovery import RunAssembly
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.runtime import platform
from megarl.run.memory import gpu_demand
from megarl.run.memory.gpu_demand import (
    CUDA_CONTEXT_BYTES,
    GIB,
    POLICY,
    USABLE_FRACTION,
    EngineBytes,
    GpuDemand,
    ModelDemand,
    gpu_demands,
    gpu_memory,
)
from megarl.run.memory.step_ledger import (
    DeviceLedger,
    EngineFraction,
    LedgerModel,
    StepMemory,
    StepSimulation,
    choose_mem_fraction,
    free_at_engine_start,
    kv_cache_bytes,
    largest_kv_cache,
    largest_mem_fraction,
    peak,
    step_ledger,
    with_fraction,
)
from megarl.run.memory.training_memory import ActivationBytes, StateBytes
from megarl.run.remote.trainer_group import read_gpu_bytes
from tests.run.finished_groups import run_config

H100 = gpu_memory("h100-80")
STATE = StateBytes(parameters=16 * GIB, gradients=32 * GIB, main_parameters=4 * GIB, moments=8 * GIB)
ACTIVATIONS = ActivationBytes(stored=5 * GIB, recomputed=2 * GIB, head=1 * GIB, forward=2 * GIB)
MODEL = ModelDemand(name=POLICY, state=STATE, activations=ACTIVATIONS, is_trained=True)
PARAMETERS = StateBytes(parameters=16 * GIB)
REFERENCE = ModelDemand(
    name="reference", state=PARAMETERS, activations=ACTIVATIONS, is_trained=False, offload_when_idle=True
)
COLOCATED = GpuDemand(
    pool="main",
    rank=0,
    models=(MODEL, REFERENCE),
    offload=OffloadConfig(optimizer=True, gradients=True),
    engine=EngineBytes(weights=16 * GIB, kv_per_token=147_456, graphs=GIB, working=10 * GIB),
    releases_engine_memory=True,
    bucket_bytes=GIB // 2,
)
CONTEXTS = 2 * CUDA_CONTEXT_BYTES + GIB
"""Both processes, and the engine's CUDA graphs."""


class RecordingLedger(DeviceLedger):
    """Keeps the order of allocations and frees."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    @override
    def allocate(self, process: str, owner: str, num_bytes: int) -> None:
        super().allocate(process, owner, num_bytes)
        self.events.append(f"+ {process} {owner}")

    @override
    def free(self, process: str, owner: str) -> int:
        self.events.append(f"- {process} {owner}")
        return super().free(process, owner)


def test_memory_moves_in_this_order_in_a_step() -> None:
    ledger = RecordingLedger()
    simulation = StepSimulation(COLOCATED, 20 * GIB, ledger=ledger)
    simulation.run(1)
    ledger.events.clear()
    simulation.run(1)
    state = [f"trainer policy {kind}" for kind in ("gradients", "main parameters", "moments")]
    reference = ["trainer reference parameters", "trainer reference activations"]
    sampling = ["+ engine kv_cache", "+ engine working memory", "- engine working memory", "- engine kv_cache"]
    scoring = [*(f"+ {owner}" for owner in reference), *(f"- {owner}" for owner in reversed(reference))]
    kinds = ("+ activations", "+ recomputed activations", "- recomputed activations", "+ language head")
    computing = [f"{kind[0]} trainer policy {kind[2:]}" for kind in (*kinds, "- language head", "- activations")]
    training = ["- engine weights", *(f"+ {owner}" for owner in state), *computing]
    push = [*(f"- {owner}" for owner in state), "+ engine weights", "+ trainer buckets", "- trainer buckets"]
    assert ledger.events == [*sampling, *scoring, *training, *push]


def peaks(demand: GpuDemand, kv_bytes: int = 0) -> dict[str, float]:
    """Return the peak of each phase, in GiB."""
    return {phase: holdings.total / GIB for phase, holdings in step_ledger(demand, kv_bytes).peaks.items()}


def difference(demand: GpuDemand, other: GpuDemand, kv_bytes: int = 0) -> dict[str, float]:
    """Return by how many GiB the peak of each phase is higher."""
    return {phase: peak - peaks(other, kv_bytes)[phase] for phase, peak in peaks(demand, kv_bytes).items()}


def test_the_peak_of_a_step_is_the_largest_phase_not_the_sum() -> None:
    ledger = step_ledger(COLOCATED, 20 * GIB)
    totals = {phase: (holdings.total - CONTEXTS) / GIB for phase, holdings in ledger.peaks.items()}
    assert totals == {
        "sampling": 16 + 16 + 20 + 10,  # parameters, engine weights, KV cache, working memory
        "scoring": 16 + 16 + 16 + 2,  # parameters, engine weights, reference with activations
        "training": 60 + 5 + 2,  # state, activations, recomputed activations
        "push": 16 + 16 + 0.5,  # parameters, engine weights, buckets
    }
    assert peak(ledger) == ledger.peaks["training"].total < H100


class LateRelease(StepMemory):
    """Frees the engines' memory after the trainer has allocated its own."""

    @override
    def begin_training(self) -> None:
        assert isinstance(self._trainer, LedgerModel)
        self._trainer.onload()
        super().begin_training()


class LateOffload(StepMemory):
    """Allocates the engines' memory before the trainer has freed its own."""

    @override
    def begin_push(self) -> None:
        assert self._engines is not None
        self._engines.resume(("weights", "kv_cache"))
        super().begin_push()


@pytest.mark.parametrize(("memory", "phase"), [(LateRelease, "training"), (LateOffload, "push")])
def test_another_order_does_not_fit(memory: type[StepMemory], phase: str) -> None:
    ledger = StepSimulation(replace(COLOCATED, models=(MODEL,)), 20 * GIB, memory).run()
    assert [name for name, holdings in ledger.peaks.items() if holdings.total > H100] == [phase]


def test_steps_after_the_first_are_alike() -> None:
    first, later = (StepSimulation(COLOCATED, GIB).run(steps) for steps in (2, 5))
    assert (first.peaks, first.ends) == (later.peaks, later.ends)


def test_engines_that_keep_their_memory_add_to_every_phase() -> None:
    # the trainer then offloads before the next sampling only
    added = difference(replace(COLOCATED, releases_engine_memory=False), COLOCATED, 20 * GIB)
    assert added == {"sampling": 0, "scoring": 20, "training": 36, "push": 20 + 44}


def test_each_offloaded_kind_leaves_sampling() -> None:
    def sampling(**kinds: bool) -> float:
        offload = OffloadConfig(**{"optimizer": False, "gradients": False} | kinds)
        return peaks(replace(COLOCATED, offload=offload))["sampling"]

    none = sampling()
    assert none - sampling(gradients=True) == 32
    assert none - sampling(optimizer=True) == 12
    assert none - sampling(weights=True) == 16


def test_idle_models_stay_where_they_are_not_offloaded() -> None:
    resident = replace(COLOCATED, models=(MODEL, replace(REFERENCE, offload_when_idle=False)))
    assert difference(resident, COLOCATED) == {"sampling": 16, "scoring": 0, "training": 16, "push": 16}


@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("stored", [1, 4])
def test_the_fraction_fills_the_gpu(stored: int, releases: bool) -> None:
    """The cache is the largest with which every phase fits: 1 MiB more would not."""
    activations = replace(ACTIVATIONS, stored=stored * GIB)
    small = replace(MODEL, state=replace(STATE, gradients=8 * GIB), activations=activations)
    demand = replace(COLOCATED, models=(small, REFERENCE), releases_engine_memory=releases)
    kv_bytes, usable = largest_kv_cache(demand, H100), USABLE_FRACTION * H100
    assert kv_bytes > 0
    assert peak(step_ledger(demand, kv_bytes)) <= usable < peak(step_ledger(demand, kv_bytes + 2**20))
    value = largest_mem_fraction(demand, H100)
    free = free_at_engine_start(demand, H100)
    assert free == H100 - 2 * CUDA_CONTEXT_BYTES - 16 * GIB  # the trainer has offloaded
    allocated = kv_cache_bytes(demand, EngineFraction(value=value, origin=""), H100)
    assert kv_bytes - free / 1000 <= allocated <= kv_bytes


def test_no_fraction_fits_where_training_does_not() -> None:
    large = replace(COLOCATED, models=(replace(MODEL, state=replace(STATE, gradients=64 * GIB)), REFERENCE))
    assert largest_kv_cache(large, H100) < 0
    assert largest_mem_fraction(large, H100) == 0.0


def test_a_chosen_fraction_leaves_sglang_the_rest() -> None:
    demand, kv_bytes = with_fraction(COLOCATED, EngineFraction(value=0.9, origin=""), H100)
    assert demand.engine is not None
    free = free_at_engine_start(COLOCATED, H100)
    assert kv_bytes == int(0.9 * free) - 16 * GIB
    assert demand.engine.working == free - int(0.9 * free) - GIB < 10 * GIB
    limited = EngineFraction(value=0.9, origin="", max_tokens=1000)
    assert kv_cache_bytes(COLOCATED, limited, H100) == 1000 * 147_456


def test_gpus_without_a_policy_score_or_sample_only() -> None:
    critic = replace(MODEL, name="critic")
    assert peaks(GpuDemand(pool="c", rank=0, models=(critic,), offload=COLOCATED.offload)) == {"scoring": 67.5}
    alone = GpuDemand(pool="b", rank=0, offload=COLOCATED.offload, engine=COLOCATED.engine, bucket_bytes=GIB)
    assert peaks(alone, 20 * GIB) == {"sampling": 47.5, "push": 38.5}


def test_a_critic_is_trained_without_the_engines_weights() -> None:
    critic = replace(MODEL, name="critic", offload_when_idle=True)
    ledger = RecordingLedger()
    StepSimulation(replace(COLOCATED, models=(MODEL, critic)), 20 * GIB, ledger=ledger).run(1)
    events = ledger.events[ledger.events.index("- engine working memory") :]
    order = ["- engine kv_cache", "+ trainer critic activations", "- engine weights", "+ trainer critic gradients"]
    assert [events.index(event) for event in order] == sorted(events.index(event) for event in order)
    assert ledger.peaks["scoring"].total == ledger.peaks["training"].total + 16 * GIB  # the policy's weights


@pytest.fixture
def qwen3_8b(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_architecture(QWEN3_8B, origin="")
    monkeypatch.setattr(gpu_demand, "load_architecture_and_dtype", lambda path, **_: (model, "bfloat16"))
    monkeypatch.setattr(gpu_demand, "model_head", lambda path: "lm")
    monkeypatch.setattr(gpu_demand, "read_model_config", lambda path: QWEN3_8B)


def make_config(**sections: Any) -> RunConfig:
    return run_config({"type": "grpo"}, placement={"slots_per_node": 8, "device": "cuda"}, **sections)


def choose(config: RunConfig, gpu_bytes: list[int] | None) -> tuple[float | None, list[str]]:
    """Return what a run chooses for GPUs of these sizes, and what it tells the user."""
    assembly, messages = RunAssembly.__new__(RunAssembly), list[str]()
    assembly._config = config
    assembly._notify = messages.append  # type: ignore[method-assign]
    found: Any = None if gpu_bytes is None else SimpleNamespace(result=lambda timeout: gpu_bytes)
    return assembly._choose_mem_fraction(found), messages


@pytest.mark.usefixtures("qwen3_8b")
def test_a_run_sets_the_largest_fraction_with_which_all_phases_fit() -> None:
    config = make_config(trainer={"recompute": {"granularity": "full"}}, rollout={"replicas": 8})
    value, messages = choose(config, [H100, 2 * H100])
    assert value is not None
    assert messages == [f"engines: largest mem_fraction that fits all phases {value:.3f}"]
    (demand,) = gpu_demands(config, H100)
    fraction = choose_mem_fraction(config, [demand], H100)
    assert fraction.value == value  # as `megarl check --gpu` prints it
    assert 0.95 * USABLE_FRACTION * H100 < peak(step_ledger(*with_fraction(demand, fraction, H100))) <= H100


@pytest.mark.usefixtures("qwen3_8b")
def test_the_users_fraction_and_engines_without_shared_gpus_are_left_alone() -> None:
    chosen = make_config(rollout={"engine": {"mem_fraction": 0.4}})
    assert choose(chosen, [H100]) == (0.4, ["engines: rollout.engine.mem_fraction 0.400"])
    assert choose(chosen, None) == (0.4, [])
    assert choose(make_config(), None) == (None, [])  # on CPU, and on GPUs of their own


@pytest.mark.usefixtures("qwen3_8b")
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
    properties = {3: SimpleNamespace(total_memory=80 * GIB)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    assert read_gpu_bytes() == 80 * GIB
