"""Activation recompute: which modules run twice, and that gradients are bitwise equal."""

from collections import Counter
from functools import cache

import pytest

from megarl.config.trainer import RecomputeConfig
from tests.megatron import rank_models
from tests.megatron.fidelity.measure import measure, nll_request
from tests.megatron.fidelity.reference import draw
from tests.megatron.rank_models import assert_same_bits, make_trainer, model_spec, train_step, trainer_spec
from tests.megatron.ranks import run_ranks, sample

SEQUENCES = draw((3, 21, 34, 60), 331)

RECOMPUTED_SUFFIXES = {
    "core_attn": (".core_attention",),
    "mla_up_proj": (".linear_q_up_proj", ".linear_kv_up_proj"),
    "mlp": (".mlp", ".mlp.linear_fc1", ".mlp.linear_fc2"),
    "moe": (".mlp.router", ".mlp.experts", ".mlp.shared_experts"),
    "shared_experts": (".mlp.shared_experts", ".shared_experts.linear_fc1", ".shared_experts.linear_fc2"),
}
"""By recompute module: name suffixes of the submodules that must run twice, in layers that have them."""


def train_on_rank(path, recompute):
    """Run one step of one micro-batch; returns gradients and the number of forward calls per module."""
    trainer = make_trainer(trainer_spec(model_spec(path, recompute=recompute)))
    calls, recorded = Counter(), rank_models.record_gradients(trainer)
    for name, module in trainer.model.chunks[0].module.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    train_step(trainer, nll_request(SEQUENCES, 256))
    return recorded[0], calls


@pytest.fixture(scope="module")
def train(model_folder, tmp_path_factory):
    """Function from model name and recompute options to (gradients, forward calls per module)."""
    folder = tmp_path_factory.mktemp("recompute")

    @cache
    def run(name, **options):
        return run_ranks(train_on_rank, 1, folder, model_folder(name), RecomputeConfig(**options))

    return run


def find_recomputed(calls, baseline):
    assert all(baseline[name] == 1 for name in baseline if name.startswith("decoder.layers."))
    return {name for name, count in calls.items() if count == 2 * baseline[name] and ".experts." not in name}


def expected_recomputed(calls, module):
    """Return the names of submodules that run again if `module` is recomputed; at least one layer must have it."""
    routed = tuple(name.removesuffix("router") for name in calls if name.endswith(".mlp.router"))
    outputs = {name for name in calls if name.endswith(RECOMPUTED_SUFFIXES[module])}
    if module == "mlp":
        outputs = {name for name in outputs if not f"{name}.".startswith(routed)}
    assert outputs, f"no layer has {module}"
    return outputs


FULL = [(name, layers) for name in ("qwen3", "gemma2", "qwen3_moe", "deepseek_v3") for layers in (1, 2)]


@pytest.mark.parametrize(("name", "layers"), sample(FULL, [("gemma2", 2), ("deepseek_v3", 1)]))
def test_full_recompute_of_layers(name, layers, train):
    want, baseline = train(name)
    gradients, calls = train(name, granularity="full", layers=layers)
    assert_same_bits(gradients, want)
    assert find_recomputed(calls, baseline) >= {f"decoder.layers.{i}" for i in range(4)}


SELECTIVE = [
    ("qwen3", ("core_attn",)),
    ("gemma2", ("core_attn", "mlp")),
    ("qwen3_moe", ("mlp", "moe")),
    ("deepseek_v32", ("core_attn", "moe")),
    ("deepseek_v3", ("mlp", "mla_up_proj", "shared_experts")),
]


@pytest.mark.parametrize(("name", "modules"), sample(SELECTIVE, [SELECTIVE[1], *SELECTIVE[3:]]), ids=str)
def test_selective_recompute_of_modules(name, modules, train):
    want, baseline = train(name)
    gradients, calls = train(name, granularity="selective", modules=modules)
    assert_same_bits(gradients, want)
    expected = {of for module in modules for of in expected_recomputed(baseline, module)}
    recomputed = find_recomputed(calls, baseline)
    assert recomputed >= expected
    assert all(any(f"{of}.".startswith(f"{each}.") for each in expected) for of in recomputed)


@pytest.mark.parametrize(
    ("name", "recompute", "parallel"),
    [
        ("deepseek_v3", {"granularity": "selective", "modules": ("core_attn", "moe", "mla_up_proj")}, {"tp": 2}),
        ("gemma2", {"granularity": "full"}, {"pp": 2, "vpp": 2}),
    ],
)
def test_recompute_on_several_ranks(name, recompute, parallel, model_folder, tmp_path):
    got = measure(model_folder(name), SEQUENCES, tmp_path, world=2, max_tokens=64, recompute=recompute, **parallel)
    want = measure(model_folder(name), SEQUENCES, tmp_path, world=2, max_tokens=64, **parallel)
    assert_same_bits(got.gradients, want.gradients)
