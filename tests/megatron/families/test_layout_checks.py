"""Checks of `trainer.recompute` against a model."""

from __future__ import annotations

import pytest

from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.megatron.families.layout_checks import recomputable_modules, recompute_problems
from megarl.megatron.families.load_architecture import load_architecture
from tests.megatron.fidelity.models import CONFIGS

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def model_of(name):
    return load_architecture(CONFIGS[name] | {"architectures": [ARCHITECTURES[name]]}, origin="config.json")


def problems(name, parallel=None, **options):
    return list(recompute_problems(model_of(name), ParallelConfig(**(parallel or {})), RecomputeConfig(**options)))


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("qwen3", ["core_attn", "layernorm", "mlp"]),
        ("qwen3_moe", ["core_attn", "layernorm", "mlp", "moe", "moe_act"]),
        ("deepseek_v3", ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]),
    ],
)
def test_recomputable_modules_of_each_model(name, modules):
    assert recomputable_modules(model_of(name)) == modules
    assert problems(name, granularity="selective", modules=modules) == []


def test_unknown_module_is_reported_with_the_available_ones():
    assert problems("qwen3", granularity="selective", modules=("core_attn", "mla_up_proj")) == [
        "trainer.recompute.modules: no layer of Qwen3ForCausalLM has mla_up_proj, needs one of core_attn, layernorm, "
        "mlp"
    ]
    (problem,) = problems("qwen3_moe", granularity="selective", modules=("shared_experts",))
    assert (
        "no layer of Qwen3MoeForCausalLM has shared_experts, needs one of core_attn, layernorm, mlp, moe, moe_act"
        in problem
    )


def test_recompute_layers_must_divide_every_model_chunk():
    assert problems("qwen3", granularity="full", layers=2) == []
    assert problems("qwen3", {"pp": 2, "vpp": 2}, granularity="full") == []
    assert problems("qwen3", granularity="full", layers=3) == [
        "trainer.recompute.layers: needs to divide the layers of every model chunk, got 4 % 3 = 1"
    ]
    (problem,) = problems("qwen3", {"pp": 2, "vpp": 2}, granularity="full", layers=2)
    assert problem.endswith("got 1 % 2 = 1")
    assert problems("qwen3", granularity="none", layers=3) == []
    assert problems("qwen3", granularity="full", method="block", layers=3) == []


def test_recompute_checks_skip_invalid_parallel_sizes():
    assert problems("qwen3", {"pp": 3}, granularity="full") == []
