"""Parallel layouts compared with one rank: log-probabilities, loss, gradient norm, all gradients by HF name."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from megarl.config.megatron import MegatronConfig
from tests.megatron.conftest import save_model
from tests.megatron.fidelity.measure import TOLERANCE, Measured, assert_same, assert_same_gradients, measure
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import SHORT, draw
from tests.megatron.ranks import sample

COMMON_LAYOUTS = {
    "tp2": {"world": 2, "tp": 2},
    "pp2": {"world": 2, "pp": 2},
    "pp2 vpp2": {"world": 2, "pp": 2, "vpp": 2},
    "dp2": {"world": 2},
    "cp2": {"world": 2, "cp": 2},
    "tp2 cp2": {"world": 4, "tp": 2, "cp": 2},
    "tp2 pp2 cp2": {"world": 8, "tp": 2, "pp": 2, "cp": 2},
}
DENSE_LAYOUTS = {
    "tp2 without sequence parallel": {"world": 2, "tp": 2, "sequence_parallel": False},
    "pp3 with uneven stages": {"world": 3, "pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    "tp2 pp2 dp2": {"world": 8, "tp": 2, "pp": 2},
}
MOE_LAYOUTS = {
    "ep2": {"world": 2, "ep": 2},
    "ep4": {"world": 4, "ep": 4},
    "tp2 etp1": {"world": 2, "tp": 2, "etp": 1},
    "tp2 ep2 etp1": {"world": 2, "tp": 2, "ep": 2, "etp": 1},
    "tp2 ep2 etp2": {"world": 4, "tp": 2, "ep": 2, "etp": 2},
    "cp2 ep2": {"world": 2, "cp": 2, "ep": 2},
    "pp2 vpp2 ep2 cp2": {"world": 4, "pp": 2, "vpp": 2, "ep": 2, "cp": 2},
    "tp2 pp2 ep2 etp1 dp2": {"world": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 1},
}
LAYOUTS = COMMON_LAYOUTS | DENSE_LAYOUTS | MOE_LAYOUTS
CASES = [
    (name, layout)
    for name, config in CONFIGS.items()
    for layout in COMMON_LAYOUTS | (MOE_LAYOUTS if "num_experts_per_tok" in config else DENSE_LAYOUTS)
]
DEFAULT = [
    ("qwen2", "dp2"),
    ("qwen2 linear", "tp2"),
    ("qwen3", "pp2"),
    ("qwen3", "tp2 without sequence parallel"),
    ("qwen3 yarn", "pp2 vpp2"),
    ("llama3", "pp3 with uneven stages"),
    ("gemma2", "tp2 cp2"),
    ("qwen3_moe", "tp2 ep2 etp2"),
    ("qwen3_moe all sparse", "cp2 ep2"),
    ("qwen3_moe sparse step", "tp2 etp1"),
    ("mixtral", "ep2"),
    ("deepseek_v3", "tp2 ep2 etp1"),
    ("deepseek_v3", "pp2 vpp2 ep2 cp2"),
    ("deepseek_v3 without query latent", "tp2"),
    ("deepseek_v32", "tp2 cp2"),
    ("glm_moe_dsa", "tp2 ep2 etp1"),
    ("gemma3", "pp2 vpp2"),
    ("glm4_moe", "tp2 ep2 etp1"),
    ("minimax_m2", "tp2 ep2 etp2"),
    ("qwen3_next", "tp2 cp2"),
    ("qwen3_5", "tp2 without sequence parallel"),
    ("qwen3_5_moe", "pp2 vpp2 ep2 cp2"),
    ("gpt_oss", "tp2 ep2 etp2"),
]
"""Every model and every axis, on at most four ranks; all other cases are slow."""


def check_layout(name, sizes, folders, tmp_path, lengths=SHORT, head="lm"):
    folder, sequences = folders(name), draw(lengths, CONFIGS[name]["vocab_size"])
    assert_same(measure(folder, sequences, tmp_path, head=head, **sizes), on_one_rank(folder, sequences, head))


@functools.cache
def on_one_rank(folder, sequences, head="lm") -> Measured:
    with tempfile.TemporaryDirectory() as scratch:
        return measure(folder, sequences, Path(scratch), head=head)


@pytest.mark.parametrize(("name", "layout"), sample(CASES, DEFAULT))
def test_layouts_match_one_rank(name, layout, model_folder, tmp_path):
    check_layout(name, LAYOUTS[layout], model_folder, tmp_path)


VALUE_CASES = [
    *(("qwen2", layout) for layout in COMMON_LAYOUTS | DENSE_LAYOUTS),
    *(("gemma2", layout) for layout in ("tp2", "pp2 vpp2", "cp2")),
    *(("qwen3_moe", layout) for layout in ("tp2 ep2 etp1", "ep2", "tp2 etp1", "tp2 ep2 etp2")),
    *(("deepseek_v3", layout) for layout in ("tp2", "pp2 vpp2 ep2 cp2")),
]
DEFAULT_VALUE_CASES = [("qwen2", "tp2 without sequence parallel"), ("qwen2", "pp2"), ("qwen3_moe", "tp2 ep2 etp1")]
"""tests/megatron/training/test_loss.py has the simple layouts."""


@pytest.mark.parametrize(("name", "layout"), sample(VALUE_CASES, DEFAULT_VALUE_CASES))
def test_layouts_of_value_models_match_one_rank(name, layout, value_folder, tmp_path):
    check_layout(name, LAYOUTS[layout], value_folder, tmp_path, head="value")


FUSED = [
    ("qwen2", "tp2"),
    ("qwen2", "tp2 without sequence parallel"),
    ("qwen2", "pp2"),
    ("gemma2", "cp2"),
    ("deepseek_v3", "pp2 vpp2"),
]


@pytest.mark.parametrize(("name", "layout"), sample(FUSED, FUSED[1:]))
def test_fused_heads_match_one_rank(name, layout, model_folder, tmp_path):
    """Tied and untied weights, with and without a softcap of the logits; the one rank's head is not fused."""
    check_layout(name, LAYOUTS[layout] | {"fused_lm_head": True}, model_folder, tmp_path)


PACKINGS = [(name, max_tokens) for name in ("qwen3", "gemma2", "deepseek_v3") for max_tokens in (1, 64, 4096)]


@pytest.mark.parametrize(
    ("name", "max_tokens"), sample(PACKINGS, [("qwen3", 4096), ("gemma2", 64), ("deepseek_v3", 1)])
)
def test_packing_does_not_change_results(name, max_tokens, model_folder, tmp_path):
    check_layout(name, {"max_tokens": max_tokens}, model_folder, tmp_path)


@pytest.mark.parametrize("layout", ["cp2", "pp2 vpp2"])
def test_packing_does_not_change_results_on_several_ranks(layout, model_folder, tmp_path):
    check_layout("qwen3", LAYOUTS[layout] | {"max_tokens": 1}, model_folder, tmp_path)


def test_sequence_order_does_not_change_results(model_folder, tmp_path):
    folder, sequences = model_folder("qwen3_moe"), draw(SHORT, CONFIGS["qwen3_moe"]["vocab_size"])
    permutation = [7, 0, 11, 3, 9, 1, 10, 5, 2, 8, 4, 6]
    got = measure(folder, tuple(sequences[i] for i in permutation), tmp_path, world=2)
    want = on_one_rank(folder, sequences)
    for i, original in enumerate(permutation):
        torch.testing.assert_close(got.scores[i], want.scores[original], rtol=0, atol=TOLERANCE)
    assert got.loss == pytest.approx(want.loss, rel=TOLERANCE)
    assert_same_gradients(got.gradients, want.gradients)


EMPTY_RANKS = {"dp2": {"world": 2}, "pp2 vpp2": {"world": 2, "pp": 2, "vpp": 2}, "cp2 dp2": {"world": 4, "cp": 2}}
EMPTY_CASES = [(name, layout) for name in ("qwen3", "deepseek_v3") for layout in EMPTY_RANKS]


@pytest.mark.parametrize(("name", "layout"), sample(EMPTY_CASES, [("qwen3", "pp2 vpp2"), ("deepseek_v3", "dp2")]))
def test_ranks_without_sequences_do_not_change_results(name, layout, model_folder, tmp_path):
    check_layout(name, EMPTY_RANKS[layout], model_folder, tmp_path, lengths=(34,))


@pytest.mark.parametrize("num_key_value_heads", sample([2, 1], [2]))
def test_tensor_parallel_ranks_may_share_key_value_heads(num_key_value_heads, tmp_path):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": num_key_value_heads}
    folder, sequences = save_model(tmp_path / "model", **sizes), draw(SHORT, 331)
    assert_same(measure(folder, sequences, tmp_path, world=4, tp=4), on_one_rank(folder, sequences))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_torch_layers_by_choice_change_nothing_where_there_are_no_others(name, model_folder, tmp_path):
    local = MegatronConfig(model={"transformer_impl": "local"})
    check_layout(name, {"megatron": local}, model_folder, tmp_path)
