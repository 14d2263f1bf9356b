"""All families on one rank, compared with transformers: log-probabilities, entropy bounds, values, gradients."""

import json
import math
import shutil

import pytest
import torch

from tests.megatron.fidelity.measure import TOLERANCE, assert_same_gradients, gradient_norm, measure, score_on_ranks
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import LONG, SHORT, differentiate, differentiate_values, draw, score
from tests.megatron.ranks import sample


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_gradients_match_transformers(name, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    want = differentiate(folder, sequences)
    got = measure(folder, sequences, tmp_path)
    for i, logprobs in enumerate(want.scores):
        torch.testing.assert_close(got.token_scores[i], logprobs, rtol=0, atol=TOLERANCE)
        assert (got.scores[i][1] >= 0).all()
        assert (got.scores[i][1] <= math.log(CONFIGS[name]["vocab_size"]) + 1e-5).all()
    assert got.loss == pytest.approx(want.loss, abs=TOLERANCE)
    assert_same_gradients(got.gradients, want.gradients)
    assert got.grad_norm == pytest.approx(gradient_norm(want.gradients), rel=TOLERANCE)


WITHOUT_VALUE_MODEL = ("deepseek_v32", "glm_moe_dsa", "glm4_moe", "minimax_m2", "qwen3_5_moe")
VALUE_MODELS = [name for name in CONFIGS if name not in WITHOUT_VALUE_MODEL]
"""Models of which transformers has value models."""


@pytest.mark.parametrize("name", sample(VALUE_MODELS, ["qwen2", "gemma2", "qwen3_moe"]))
def test_values_and_their_gradients_match_transformers(name, value_folder, tmp_path):
    folder, sequences = value_folder(name), draw((1, *SHORT), CONFIGS[name]["vocab_size"])
    want, got = differentiate_values(folder, sequences), measure(folder, sequences, tmp_path, head="value")
    for i, values in enumerate(want.scores):
        torch.testing.assert_close(got.token_scores[i], values, rtol=0, atol=TOLERANCE)
    assert got.loss == pytest.approx(want.loss, rel=TOLERANCE)
    assert_same_gradients(got.gradients, want.gradients, tolerance=3e-5)  # errors of both signs partly cancel
    assert got.grad_norm == pytest.approx(gradient_norm(want.gradients), rel=TOLERANCE)


PACKS = [("qwen3", {}), ("gemma2", {"world": 2, "cp": 2}), ("mixtral", {"world": 2, "tp": 2}), ("deepseek_v3", {})]
PACKS += [("deepseek_v32", {"world": 2, "cp": 2})]


@pytest.mark.parametrize(("name", "sizes"), sample(PACKS, [PACKS[1], PACKS[3]]), ids=str)
def test_lengths_from_1_to_1025_in_one_pack(name, sizes, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw(LONG, CONFIGS[name]["vocab_size"])
    got = score_on_ranks(folder, sequences, tmp_path, max_tokens=2 * sum(LONG), **sizes)
    for i, logprobs in enumerate(score(folder, sequences)):
        torch.testing.assert_close(got[i][0], logprobs, rtol=0, atol=TOLERANCE)


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
    ("deepseek_v32", {"index_topk": 9}),
    ("deepseek_v32", {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}),  # RoPE of the indexer
    ("glm_moe_dsa", {"index_topk": 4096}),
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
