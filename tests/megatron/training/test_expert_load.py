"""Routers: tokens per expert and the load-balancing loss against transformers, and frozen weights."""

from __future__ import annotations

import pytest
import torch

from megarl.config.megatron import MoeConfig
from tests.megatron.fidelity.reference import _load
from tests.megatron.rank_models import (
    gather,
    gather_full,
    make_trainer,
    model_spec,
    record_gradients,
    train_step,
    trainer_spec,
)
from tests.megatron.ranks import run_ranks
from tests.megatron.training.test_trainer import ALL_INDICES, TOKENS, make_request

LAYERS, EXPERTS, TOP_K = 3, 8, 2
"""Of the tiny Qwen3-MoE model: layers with experts (one has none), experts, and experts per token."""


def train(model, request, distributed):
    """Take one training step; returns metrics, the step's gradients, weights before and after it, and stored keys."""
    trainer = make_trainer(trainer_spec(model, lr=1e-3, weight_decay=0.1, distributed=distributed))
    from megarl.megatron.checkpoint.optimizer_state import collect_optimizer_shards
    from megarl.megatron.checkpoint.shards import shards_to_save

    before = {name: tensor.detach().clone() for name, tensor in trainer.model.tensors().items()}
    recorded = record_gradients(trainer) if not model.moe.freeze_router else []
    metrics = train_step(trainer, request)
    stored = {s.key for s in shards_to_save(trainer.model, collect_optimizer_shards(trainer._optimizer))}
    after = {name: tensor.detach() for name, tensor in trainer.model.tensors().items()}
    full = gather_full(trainer.model, recorded[0]) if recorded else {}
    return metrics, full, before, after, set.union(*gather(stored))


def count_tokens(path):
    """Return the tokens that transformers routes to each expert of each layer, int64 [LAYERS, EXPERTS]."""
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
    model = _load(path)
    for tokens in TOKENS:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
        for layer, logits_TE in enumerate(logits):
            counts[layer] += logits_TE.topk(TOP_K).indices.flatten().bincount(minlength=EXPERTS)
    return counts


def test_load_of_experts_is_counted_and_frozen_routers_stay(model_folder, tmp_path):
    path = model_folder("qwen3_moe")
    spec = model_spec(path, {"ep": 2}, moe=MoeConfig(freeze_router=True))
    metrics, _, before, after, stored = run_ranks(train, 2, tmp_path, spec, make_request(ALL_INDICES), True)
    counts = count_tokens(path).double()
    assert int(counts.sum()) == LAYERS * TOP_K * sum(map(len, TOKENS))
    ratios = counts.amax(1) / counts.mean(1)
    assert metrics["expert_load/max_over_mean"] == pytest.approx(float(ratios.mean()))
    assert metrics["expert_load/max_over_mean_max"] == pytest.approx(float(ratios.max()))
    assert metrics["expert_load/unused"] == float((counts == 0).double().mean())
    unchanged = {name for name, tensor in after.items() if torch.equal(before[name], tensor)}
    assert unchanged == {name for name in after if name.endswith("mlp.router.weight")}
    assert len(unchanged) == LAYERS
    assert any(key.endswith("mlp.router.weight") and not key.startswith("optimizer.") for key in stored)
    assert not any(key.startswith("optimizer.") and "router" in key for key in stored)


def test_gradient_of_the_load_balancing_loss_is_that_of_transformers(model_folder, tmp_path):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    path, request = model_folder("qwen3_moe"), make_request(range(3), max_tokens=4096)
    with_loss, without = (
        run_ranks(train, 1, tmp_path, model_spec(path, moe=MoeConfig(aux_loss_coeff=coefficient)), request, False)[1]
        for coefficient in (1.0, 0.0)
    )
    model = _load(path)
    logits = [model(torch.tensor([tokens]), output_router_logits=True).router_logits for tokens in TOKENS[:3]]
    # transformers averages over layers, and counts the experts of a token one by one
    loss = sum(load_balancing_loss_func((torch.cat(layer),), EXPERTS, TOP_K) for layer in zip(*logits, strict=True))
    (loss / TOP_K).backward()
    routed = {number: layer for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    assert len(routed) == LAYERS
    for number, layer in routed.items():
        name = f"model.layers.{number}.mlp.gate.weight"
        got, want = with_loss[name] - without[name], layer.mlp.gate.weight.grad
        assert float(want.abs().max()) > 1e-3
        assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max()) + 1e-6, name
