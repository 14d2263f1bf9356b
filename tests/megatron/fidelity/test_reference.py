"""Tests of the tiny models and of the reference: every special setting of a model changes its log-probabilities."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import SHORT, differentiate, draw, score

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES = [
    ("qwen2 linear", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen3 yarn", {"rope_parameters": DEFAULT_ROPE}),
    ("qwen3 yarn", {"rope_parameters": CONFIGS["qwen3 yarn"]["rope_parameters"] | {"attention_factor": 1.0}}),
    ("llama3", {"rope_parameters": DEFAULT_ROPE}),
    ("gemma2", {"sliding_window": 9}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma2", {"hidden_activation": "silu"}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts_per_tok": 3}),
    ("mixtral", {"num_experts_per_tok": 3}),
    ("deepseek_v3", {"rope_parameters": DEFAULT_ROPE}),
    ("deepseek_v3", {"rope_parameters": CONFIGS["deepseek_v3"]["rope_parameters"] | {"mscale_all_dim": 0.0}}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}),
    ("deepseek_v3", {"rope_interleave": False}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=str)
def test_every_model_setting_changes_logprobs(name, change, model_folder, tmp_path):
    folder = model_folder(name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    sequences = draw(SHORT, config["vocab_size"])
    before, after = torch.cat(score(folder, sequences)), torch.cat(score(str(tmp_path), sequences))
    assert (before - after).abs().max() > 1e-2


def arguments(name, model_folder):
    """Return arguments of `differentiate`: partly masked sequences with advantages."""
    sequences = draw(SHORT[:8], CONFIGS[name]["vocab_size"])
    masks = tuple(tuple(i % 3 > 0 for i in range(len(s))) for s in sequences)
    return model_folder(name), sequences, masks, tuple(np.random.default_rng(0).normal(size=len(sequences)).tolist())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_every_tensor_on_disk_has_a_gradient(name, model_folder):
    folder, sequences, *how = arguments(name, model_folder)
    result = differentiate(folder, sequences, *how)
    disk = load_file(f"{folder}/model.safetensors")
    trained = {n for n in disk if not n.startswith("model.layers.4.") and not n.endswith("e_score_correction_bias")}
    assert result.gradients.keys() == trained
    assert all(result.gradients[n].shape == disk[n].shape for n in trained)
    assert torch.equal(result.logprobs[3], score(folder, sequences[3:4])[0])


@pytest.mark.parametrize(
    ("name", "experts"),
    [("qwen3", False), ("qwen3_moe", False), ("qwen3_moe", True), ("deepseek_v3", False), ("deepseek_v3", True)],
)
def test_gradient_matches_finite_difference_of_the_loss(name, experts, model_folder, tmp_path):
    """Check (L(w + e g) - L(w - e g)) / 2 e = |g|^2, with g of all experts or of all other tensors on disk."""
    folder, *how = arguments(name, model_folder)
    gradients = differentiate(folder, *how).gradients
    direction = {n: g for n, g in gradients.items() if (".experts." in n) == experts}
    slope = sum(float(g.double().square().sum()) for g in direction.values())
    step = 2e-4 / slope  # large compared with rounding, too small to route a token to another expert
    disk = load_file(f"{folder}/model.safetensors")
    losses = []
    for sign in (1, -1):
        moved = tmp_path / str(sign)
        shutil.copytree(folder, moved)
        save_file(disk | {n: disk[n] + sign * step * g for n, g in direction.items()}, moved / "model.safetensors")
        losses.append(differentiate(str(moved), *how).loss)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-2)
