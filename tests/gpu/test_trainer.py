"""The trainer on one GPU: log-probabilities and gradients against transformers, memory, checkpoints, traces."""

import gzip
import json
from dataclasses import replace

import pytest
import torch

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import OffloadConfig, OptimizerConfig
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import EVEN
from megarl.megatron.request_samples import split_by_dp
from megarl.megatron.requests import ProfileSpec
from megarl.megatron.trainer_worker import TrainerWorker
from megarl.run.memory.training_memory import ElementBytes, library_caches
from tests.megatron.checkpoint.test_training_state import differences, full_state, save
from tests.megatron.conftest import save_model
from tests.megatron.fidelity.measure import _on_rank, measure, nll_request, worst_gradient
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import SHORT, differentiate, draw
from tests.megatron.rank_models import model_spec, trainer_spec
from tests.megatron.ranks import run_ranks
from tests.megatron.runtime.test_offload import EVERYTHING, held_tensors, make_worker, num_bytes, storages

FAMILIES = ("qwen2", "qwen3 yarn", "llama3", "gemma2", "qwen3_moe", "deepseek_v3")
DENSE = ("qwen3", "llama3", "gemma2")
SEQUENCES = draw(SHORT, 331)

MEAN_TOLERANCE = 0.03
"""Of log-probabilities in bfloat16, as in tests/megatron/fidelity/test_precision.py."""
MIN_COSINE = 0.999
"""Of the gradients of dense models in bfloat16 with those in float32. Measured on a CPU: 0.9998."""

FP8_MEAN_OFF = (0.03, 0.3)
"""Least and largest mean difference of log-probabilities in FP8 from those in bfloat16. Measured on an H100 against
float32: 0.13, and 0.014 in bfloat16."""


def cosine(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Return the cosine of all gradients, as one vector."""
    a, b = (torch.cat([tensors[name].double().flatten() for name in sorted(want)]) for tensors in (got, want))
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_matches_transformers(name, model_folder, tmp_path, monkeypatch):
    """With torch's layers, as Transformer Engine has no attention in float32, and its kernels between them."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    folder, sequences = model_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    got, want = measure(folder, sequences, tmp_path, device="cuda"), differentiate(folder, sequences)
    for i, logprobs in enumerate(want.scores):
        torch.testing.assert_close(got.token_scores[i], logprobs, rtol=0, atol=1e-4)
    difference, tensor = worst_gradient(got.gradients, want.gradients)
    assert difference <= 1e-3, tensor


ON_CUDA = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in DENSE]


@pytest.mark.parametrize(("where", "name"), [("cpu", DENSE[0]), *ON_CUDA])
def test_bfloat16_is_close_to_transformers_in_float32(where, name, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    got = measure(folder, sequences, tmp_path, dtype="bfloat16", device=where)
    want = differentiate(folder, sequences)
    off = torch.cat([(got.token_scores[i] - logprobs).abs() for i, logprobs in enumerate(want.scores)])
    assert 1e-4 < off.mean() < MEAN_TOLERANCE
    assert cosine(got.gradients, want.gradients) > MIN_COSINE


def torch_layers_on_rank(spec, optimizer, sequences, max_tokens):
    """`measure` without Transformer Engine, where it is installed."""
    from megarl.megatron.runtime import platform

    platform.uses_transformer_engine = lambda: False
    return _on_rank(spec, optimizer, sequences, max_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "llama3", "qwen3_moe", "deepseek_v3"])
def test_transformer_engine_matches_torch_layers(name, model_folder, tmp_path):
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine: make setup-gpu")
    folder, sequences = model_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    engine = measure(folder, sequences, tmp_path, dtype="bfloat16", device="cuda")
    spec, optimizer = model_spec(folder, dtype="bfloat16"), OptimizerConfig(lr=1e-3, distributed=False)
    plain = run_ranks(torch_layers_on_rank, 1, tmp_path, spec, optimizer, sequences, 256, device="cuda")
    assert engine.gradients.keys() == plain.gradients.keys()
    off = torch.cat([(engine.token_scores[i] - plain.token_scores[i]).abs() for i in range(len(sequences))])
    assert off.mean() < MEAN_TOLERANCE
    routed = "experts" in "".join(engine.gradients)  # rounding may send tokens to other experts
    assert cosine(engine.gradients, plain.gradients) > (0.9 if routed else MIN_COSINE)


FP8_SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
FP8_SIZES |= {"num_attention_heads": 4}
"""Matrices whose sides are multiples of 128, the side of a block of scales."""


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_fp8_is_close_to_bfloat16(name, recipe, tmp_path):
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine: make setup-gpu")
    folder, sequences = save_model(tmp_path / "model", name, **FP8_SIZES), draw(SHORT, 331)
    want, got = (
        measure(folder, sequences, tmp_path, dtype="bfloat16", device="cuda", megatron=MegatronConfig(model=model))
        for model in ({}, {"fp8": "hybrid", "fp8_recipe": recipe})
    )
    off = torch.cat([(got.token_scores[i] - want.token_scores[i]).abs() for i in range(len(sequences))])
    assert FP8_MEAN_OFF[0] < off.mean() < FP8_MEAN_OFF[1]
    routed = name == "qwen3_moe"  # rounding sends tokens to other experts
    assert cosine(got.gradients, want.gradients) > (0.8 if routed else 0.95)


def fp8_caches_on_rank(path):
    """Return the bytes that an offload of caches alone frees after a step, and those that the next step allocates."""
    fp8 = MegatronConfig(model={"fp8": "hybrid", "fp8_recipe": "blockwise"})
    worker = TrainerWorker(trainer_spec(model_spec(path, dtype="bfloat16", megatron=fp8), lr=1e-3))
    found = []
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        worker.train_step(make_train_request())
        trained = torch.cuda.memory_allocated()
        worker.offload(OffloadConfig(optimizer=False, gradients=False))
        found.append((trained - torch.cuda.memory_allocated(), trained - before))
    return found


@pytest.mark.gpu
def test_an_offload_frees_the_fp8_copies_of_weights(tmp_path):
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine: make setup-gpu")
    folder = save_model(tmp_path / "model", "qwen3", **FP8_SIZES)
    architecture, _ = load_architecture_and_dtype(folder)
    element = ElementBytes(parameters=2, gradients=4, main_parameters=4, moments=8, quantized=2)
    options = {"head_kind": "fused", "is_trained": True}
    (planned,) = library_caches(architecture, RankGrid(), EVEN, element, **options)
    _, (freed, allocated) = run_ranks(fp8_caches_on_rank, 1, tmp_path, folder, device="cuda")
    assert planned.quantized <= freed <= 2 * (planned.quantized + planned.dummy_gradients)
    assert allocated == pytest.approx(freed, rel=0.1)


def make_train_request():
    (request,) = split_by_dp(nll_request(SEQUENCES, 128), RankGrid())
    return request


def offload_on_rank(path):
    """Return bytes allocated before, during and after an offload, bytes reported, and differing tensors.

    On a GPU, torch's allocator keeps no segment without tensors during the offload.
    """
    worker = make_worker(path, "bfloat16")
    worker.train_step(make_train_request())
    held = held_tensors(worker)
    tensors, every = [*held["weights"], *held["optimizer"]], [t for of in held.values() for t in of]

    def allocated():
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else num_bytes(every)

    before, copies = allocated(), [t.cpu().clone() for t in tensors]
    stats = worker.offload(EVERYTHING)
    during = allocated()
    if torch.cuda.is_available():
        segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == torch.cuda.current_device()]
        assert all(each["allocated_size"] > 0 for each in segments)  # empty ones went back to the device
        assert torch.cuda.memory_reserved() == sum(each["total_size"] for each in segments)
    worker.trainer.memory.onload()
    changed = sum(not torch.equal(t.cpu(), copy) for t, copy in zip(tensors, copies, strict=True))
    return before, during, allocated(), stats.device_bytes, len(storages(every)), changed


def test_offload_returns_memory_and_is_bitwise_exact(device, model_folder, tmp_path):
    found = run_ranks(offload_on_rank, 1, tmp_path, model_folder("qwen3"), device=device)
    before, during, after, freed, num_storages, changed = found
    assert changed == 0
    assert after == before
    # the allocator rounds each storage up to 512 bytes
    assert 0 < freed <= before - during < freed + 512 * num_storages


def save_on_rank(path, folder):
    """Return the training state that is saved."""
    worker = make_worker(path, "bfloat16")
    worker.train_step(make_train_request())
    save(worker, folder)
    return full_state(worker)


def load_on_rank(path, folder):
    worker = make_worker(path, "bfloat16")
    worker.load_training(folder)
    loaded = full_state(worker)
    worker.train_step(make_train_request())
    assert differences(full_state(worker), loaded)
    return loaded


@pytest.mark.gpu
def test_loaded_training_state_is_bitwise_the_saved_one_and_can_be_trained(model_folder, tmp_path):
    arguments = (model_folder("qwen3"), str(tmp_path / "state"))
    want = run_ranks(save_on_rank, 1, tmp_path, *arguments, device="cuda")
    got = run_ranks(load_on_rank, 1, tmp_path, *arguments, device="cuda")
    assert differences(got, want) == []


def trace_on_rank(path, folder):
    worker = make_worker(path, "bfloat16")
    worker.train_step(make_train_request())
    profile = ProfileSpec(folder=folder, step=2, ranks=(0,))
    return worker.train_step(replace(make_train_request(), profile=profile)).metrics


@pytest.mark.gpu
def test_a_step_reports_its_throughput_and_its_trace_has_kernels(model_folder, tmp_path, report):
    metrics = run_ranks(trace_on_rank, 1, tmp_path, model_folder("qwen3"), str(tmp_path / "profile"), device="cuda")
    assert metrics["throughput/tokens_per_second_per_gpu"] > 0
    assert 0 < metrics.get("throughput/mfu", 1e-6) < 1
    trace = json.loads(gzip.decompress((tmp_path / "profile/step-2-rank-0.json.gz").read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    lines = (f"{name}: {value:.4g}" for name, value in metrics.items() if name.startswith("throughput/"))
    report("one training step of a tiny model", "\n".join(lines))
