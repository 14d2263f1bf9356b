"""All parallel layouts compared with one rank: log-probabilities, loss, gradient norm, all gradients by HF name."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.megatron.conftest import save_model
from tests.megatron.fidelity.measure import Measured, measure, worst_gradient
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import SHORT, draw

TOLERANCE = 1e-5

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
CASES = [
    (name, layout, sizes)
    for name, config in CONFIGS.items()
    for layout, sizes in (COMMON_LAYOUTS | (MOE_LAYOUTS if "num_experts_per_tok" in config else DENSE_LAYOUTS)).items()
]
# One model of each attention and feed-forward type runs in all layouts, the others in a reduced set.
ALL_LAYOUT_MODELS = ("qwen2", "gemma2", "qwen3_moe", "deepseek_v3")
REDUCED_LAYOUTS = ("tp2", "pp2 vpp2", "cp2", "ep2", "tp2 ep2 etp2")
QUICK = [case for case in CASES if case[0] in ALL_LAYOUT_MODELS or case[1] in REDUCED_LAYOUTS]
SLOW = [case for case in CASES if case not in QUICK]


def check_layout(name, sizes, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    want, got = on_one_rank(folder, sequences), measure(folder, sequences, tmp_path, **sizes)
    assert_same(got, want)


@functools.cache
def on_one_rank(folder, sequences) -> Measured:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as scratch:
        return measure(folder, sequences, Path(scratch))


def assert_same(got: Measured, want: Measured) -> None:
    assert got.logprobs.keys() == want.logprobs.keys()
    for i, logprobs in want.logprobs.items():
        torch.testing.assert_close(got.logprobs[i], logprobs, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(got.entropies[i], want.entropies[i], rtol=0, atol=TOLERANCE)
    assert got.loss == pytest.approx(want.loss, rel=TOLERANCE)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=TOLERANCE)
    assert got.gradients.keys() == want.gradients.keys()
    difference, tensor = worst_gradient(got.gradients, want.gradients)
    assert difference <= TOLERANCE, tensor


def ids(case):
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("name", "layout", "sizes"), QUICK, ids=ids)
def test_layouts_match_one_rank(name, layout, sizes, model_folder, tmp_path):
    check_layout(name, sizes, model_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "sizes"), SLOW, ids=ids)
def test_remaining_layouts_match_one_rank(name, layout, sizes, model_folder, tmp_path):
    check_layout(name, sizes, model_folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2", "tp2"),
        ("qwen2", "tp2 without sequence parallel"),
        ("qwen2", "pp2"),
        ("gemma2", "cp2"),
        ("deepseek_v3", "pp2 vpp2"),
    ],
)
def test_fused_heads_match_one_rank(name, layout, model_folder, tmp_path):
    """Tied and untied weights, with and without a softcap of the logits; the one rank's head is not fused."""
    sizes = (COMMON_LAYOUTS | DENSE_LAYOUTS)[layout]
    check_layout(name, sizes | {"fused_lm_head": True}, model_folder, tmp_path)


@pytest.mark.parametrize("max_tokens", [1, 64, 4096], ids=["unpacked", "small packs", "one pack"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v3"])
def test_packing_does_not_change_results(name, max_tokens, model_folder, tmp_path):
    check_layout(name, {"max_tokens": max_tokens}, model_folder, tmp_path)


@pytest.mark.parametrize("sizes", [{"world": 2, "cp": 2}, {"world": 2, "pp": 2, "vpp": 2}], ids=["cp2", "pp2 vpp2"])
def test_packing_does_not_change_results_on_several_ranks(sizes, model_folder, tmp_path):
    check_layout("qwen3", sizes | {"max_tokens": 1}, model_folder, tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_sequence_order_does_not_change_results(name, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    permutation = [7, 0, 11, 3, 9, 1, 10, 5, 2, 8, 4, 6]
    got = measure(folder, tuple(sequences[i] for i in permutation), tmp_path, world=2)
    want = on_one_rank(folder, sequences)
    for i, original in enumerate(permutation):
        torch.testing.assert_close(got.logprobs[i], want.logprobs[original], rtol=0, atol=TOLERANCE)
    assert got.loss == pytest.approx(want.loss, rel=TOLERANCE)
    difference, tensor = worst_gradient(got.gradients, want.gradients)
    assert difference <= TOLERANCE, tensor


@pytest.mark.parametrize(
    "sizes", [{"world": 2}, {"world": 2, "pp": 2, "vpp": 2}, {"world": 4, "cp": 2}], ids=["dp2", "pp2 vpp2", "cp2 dp2"]
)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_ranks_without_sequences_do_not_change_results(name, sizes, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw((34,), CONFIGS[name]["vocab_size"])
    assert_same(measure(folder, sequences, tmp_path, **sizes), on_one_rank(folder, sequences))


@pytest.mark.parametrize("heads", [(8, 2), (8, 1)], ids=["2 key-value heads", "1 key-value head"])
def test_tensor_parallel_ranks_may_share_key_value_heads(heads, tmp_path):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    folder, sequences = save_model(tmp_path / "model", **sizes), draw(SHORT, 331)
    assert_same(measure(folder, sequences, tmp_path, world=4, tp=4), on_one_rank(folder, sequences))
