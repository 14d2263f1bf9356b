"""Value models: values and gradients compared with transformers, and all layouts compared with one rank."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.megatron.request_split import split_by_dp
from megarl.megatron.requests import ModelSpec, TrainerSpec
from megarl.placement.rank_grid import RankGrid
from tests.megatron.fidelity.measure import as_trajectory, assemble, collect_gradients, nll_request, worst_gradient
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import SHORT, differentiate_values, draw, draw_weights
from tests.megatron.ranks import run_ranks

TOLERANCE = 1e-5

FAMILIES = ("qwen2", "llama3", "gemma2", "qwen3_moe")
OTHER_FAMILIES = [name for name in CONFIGS if name not in FAMILIES]

LAYOUTS = [
    ("qwen2", {"world": 2, "tp": 2}),
    ("qwen2", {"world": 2, "tp": 2, "sequence_parallel": False}),
    ("qwen2", {"world": 2, "pp": 2}),
    ("qwen2", {"world": 2}),
    ("qwen2", {"world": 2, "cp": 2}),
    ("qwen3_moe", {"world": 2, "tp": 2, "ep": 2, "etp": 1}),
]
OTHER_LAYOUTS = [
    ("qwen2", {"world": 2, "pp": 2, "vpp": 2}),
    ("gemma2", {"world": 2, "tp": 2}),
    ("gemma2", {"world": 2, "pp": 2, "vpp": 2}),
    ("gemma2", {"world": 2, "cp": 2}),
    ("qwen3_moe", {"world": 2, "ep": 2}),
    ("qwen3_moe", {"world": 2, "tp": 2, "etp": 1}),
    ("qwen3_moe", {"world": 4, "tp": 2, "ep": 2, "etp": 2}),
    ("deepseek_v3", {"world": 2, "tp": 2}),
    ("deepseek_v3", {"world": 4, "pp": 2, "vpp": 2, "ep": 2, "cp": 2}),
    ("qwen3", {"world": 8, "tp": 2, "pp": 2, "cp": 2}),
    ("qwen3", {"world": 8, "tp": 2, "pp": 2}),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    values: dict[int, torch.Tensor]
    """By sequence index, float32 [T]; bitwise equal on all ranks that return them."""
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """After one optimizer step."""


def measure(folder, sequences, tmp_path, *, world=1, dtype="float32", distributed=False, **parallel) -> Measured:
    """Take one optimizer step on the sum of values weighted by `draw_weights`, on `world` gloo ranks."""
    model = ModelSpec(model_path=folder, dtype=dtype, parallel=ParallelConfig(**parallel), head="value")
    spec = TrainerSpec(
        model=model, optimizer=OptimizerConfig(lr=1e-3, clip_grad=1.0, distributed=distributed), optimizer_steps=1
    )
    return run_ranks(step_on_rank, world, tmp_path, spec, sequences)


def step_on_rank(spec, sequences):
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.training.trainer import MegatronTrainer

    trainer = MegatronTrainer(spec)
    model, grid = trainer.model, RankGrid.of(spec.model.parallel, dist.get_world_size())
    (batch,) = split_by_dp(nll_request(sequences, 256), grid)[dist.get_rank()].mini_batches
    micro_batches = [[batch.samples[n].index for n in indices] for indices in batch.micro_batches]
    packs = [model.pack([as_trajectory(sequences[i]) for i in micro_batch]) for micro_batch in micro_batches]
    values = values_of(model, packs, micro_batches, sequences)
    weights = draw_weights(sequences)
    weights_of = {
        id(packed): weights_of_pack(packed, [weights[i] for i in micro_batch])
        for packed, micro_batch in zip(packs, micro_batches, strict=True)
    }

    def loss(values_t, packed):
        assert values_t.dtype == torch.float32
        # DDP averages over data-parallel ranks, but the loss is a sum
        return (values_t * weights_of[id(packed)]).sum() * model.groups.dp.size(), {}

    model.forward_backward(packs, loss, ddp_chunks=trainer._ddp_chunks)
    gradients = {name: grad.clone() for name, grad in collect_gradients(trainer).items()}
    _, grad_norm, _ = trainer._optimizer.step()
    gathered: list[Any] = [None] * grid.size
    dist.all_gather_object(gathered, (values, float(grad_norm), model.layout, gradients, model.tensors()))
    rank_values, norms, layouts, all_gradients, tensors = zip(*gathered, strict=True)
    assert len(set(norms)) == 1, norms
    merged: dict[int, torch.Tensor] = {}
    for each in rank_values:
        for i, values_T in each.items():
            assert torch.equal(merged.setdefault(i, values_T), values_T), f"ranks disagree about sequence {i}"
    # with the distributed optimizer each rank has the reduced gradient of its shard only
    full_gradients = {} if spec.optimizer.distributed else assemble(list(layouts), list(all_gradients))
    return Measured(
        values=merged, grad_norm=norms[0], gradients=full_gradients, weights=assemble(list(layouts), list(tensors))
    )


def weights_of_pack(packed, weights):
    """Return the weights of this rank's tokens, [t]; 0 for padding."""
    starts = packed.batch.cu_seqlens_S.tolist()
    weights_T = torch.zeros(starts[-1])
    for start, of in zip(starts, weights, strict=False):
        weights_T[start : start + len(of)] = of
    return weights_T[packed.index_t]


def values_of(model, packs, micro_batches, sequences):
    """Return values by sequence index of this replica; empty except on the last pipeline stage."""
    import torch.distributed as dist

    values = {}
    for values_t, packed, micro_batch in zip(model.values(packs), packs, micro_batches, strict=False):
        assert values_t.dtype == torch.float32
        assert not values_t.requires_grad
        starts = packed.batch.cu_seqlens_S.tolist()
        values_T = torch.zeros(starts[-1])
        values_T[packed.index_t] = values_t
        dist.all_reduce(values_T, group=model.groups.cp)
        for start, i in zip(starts, micro_batch, strict=False):
            values[i] = values_T[start : start + len(sequences[i])].clone()
    return values


def check_family(name, value_folder, tmp_path):
    folder, sequences = value_folder(name), draw((1, *SHORT), CONFIGS[name]["vocab_size"])
    want, got = differentiate_values(folder, sequences), measure(folder, sequences, tmp_path)
    for i, values in enumerate(want.values):
        torch.testing.assert_close(got.values[i], values, rtol=0, atol=TOLERANCE)
    assert got.gradients.keys() == want.gradients.keys()
    difference, tensor = worst_gradient(got.gradients, want.gradients)
    assert difference <= TOLERANCE, tensor
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in want.gradients.values()))
    assert got.grad_norm == pytest.approx(norm, rel=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_match_transformers(name, value_folder, tmp_path):
    check_family(name, value_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_values_and_gradients_of_other_families_match_transformers(name, value_folder, tmp_path):
    check_family(name, value_folder, tmp_path)


@functools.cache
def on_one_rank(folder, sequences) -> Measured:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as scratch:
        return measure(folder, sequences, Path(scratch))


def check_layout(name, sizes, value_folder, tmp_path):
    folder, sequences = value_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    want, got = on_one_rank(folder, sequences), measure(folder, sequences, tmp_path, **sizes)
    assert got.values.keys() == want.values.keys()
    for i, values in want.values.items():
        torch.testing.assert_close(got.values[i], values, rtol=0, atol=TOLERANCE)
    assert got.gradients.keys() == want.gradients.keys()
    difference, tensor = worst_gradient(got.gradients, want.gradients)
    assert difference <= TOLERANCE, tensor
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=TOLERANCE)


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_layouts_match_one_rank(name, sizes, value_folder, tmp_path):
    check_layout(name, sizes, value_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), OTHER_LAYOUTS, ids=str)
def test_remaining_layouts_match_one_rank(name, sizes, value_folder, tmp_path):
    check_layout(name, sizes, value_folder, tmp_path)


def test_distributed_optimizer_matches_replicated_optimizer(value_folder, tmp_path):
    folder, sequences = value_folder("qwen2"), draw(SHORT, CONFIGS["qwen2"]["vocab_size"])
    want, got = (measure(folder, sequences, tmp_path, world=2, distributed=shards) for shards in (False, True))
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-6)
    worst = {name: float((got.weights[name] - weight).abs().max()) for name, weight in want.weights.items()}
    assert max(worst.values()) <= 1e-6, max(worst, key=worst.get)


def test_values_of_bfloat16_models_are_float32(value_folder, tmp_path):
    folder, sequences = value_folder("qwen2"), draw(SHORT, CONFIGS["qwen2"]["vocab_size"])
    got, want = measure(folder, sequences, tmp_path, dtype="bfloat16"), differentiate_values(folder, sequences)
    values, exact = torch.cat([got.values[i] for i in range(len(sequences))]), torch.cat(want.values)
    assert not torch.equal(values, values.bfloat16().float())
    assert 1e-5 < (values - exact).abs().mean() < 0.03 * exact.std()
