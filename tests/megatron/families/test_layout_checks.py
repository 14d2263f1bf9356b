"""Layers of pipeline stages, compared with megatron-core's, and checks of `trainer.recompute` against a model."""

import pytest

from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.trainer_layouts import (
    PipelineSplit,
    recomputable_modules,
    recompute_problems,
    stage_layers,
)
from tests.megatron.fidelity.models import CONFIGS

SPLITS = [
    (8, 1, PipelineSplit()),
    (8, 4, PipelineSplit()),
    (8, 2, PipelineSplit(num_chunks=2)),
    (12, 3, PipelineSplit(num_chunks=4)),
    (61, 16, PipelineSplit(last=1)),
    (61, 16, PipelineSplit(first=3, last=2)),
    (7, 3, PipelineSplit(first=3)),
    (5, 2, PipelineSplit(first=3, last=2)),
    (10, 4, PipelineSplit(first=2, last=4, num_chunks=2)),
    (14, 4, PipelineSplit(last=2, num_chunks=2)),
]


@pytest.mark.parametrize(("layers", "pp", "split"), SPLITS, ids=str)
def test_stages_match_megatron_core(layers: int, pp: int, split: PipelineSplit) -> None:
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=split.num_chunks if split.num_chunks > 1 else None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        pipeline_dtype=torch.float32,
    )
    stages = stage_layers(layers, pp, split)
    assert [len(chunks) for chunks in stages] == [split.num_chunks] * pp
    for stage, chunks in enumerate(stages):
        for chunk, here in enumerate(chunks):
            vp_stage = chunk if split.num_chunks > 1 else None
            start = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
            count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
            assert here == range(start, start + count), (stage, chunk)
    assert sorted(i for chunks in stages for here in chunks for i in here) == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "pp", "split", "message"),
    [
        (61, 16, PipelineSplit(), r"pp needs to divide the layers, got 61 % 16 = 13"),
        (61, 16, PipelineSplit(last=2), r"pp needs to divide the layers, got \(61 - 2\) % 15 = 14"),
        (5, 2, PipelineSplit(first=3, last=3), r"the stages need to hold 5 layers, got 3 \+ 3"),
        (8, 4, PipelineSplit(first=0), r"a stage needs at least 1 layer, got 0"),
        (4, 3, PipelineSplit(first=5), r"pp needs to divide the layers, got \(4 - 5\) % 2 = 1"),
        (8, 1, PipelineSplit(last=4), r"need pp > 1, got pp 1"),
        (8, 1, PipelineSplit(num_chunks=2), r"vpp needs pp > 1, got vpp 2 with pp 1"),
        (8, 2, PipelineSplit(num_chunks=3), r"vpp needs to divide the layers of every stage, got 4 % 3 = 1 on stage 0"),
    ],
    ids=str,
)
def test_impossible_splits_raise(layers: int, pp: int, split: PipelineSplit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage_layers(layers, pp, split)


ARCHITECTURES = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}


def model_of(name):
    config = CONFIGS[name] | {"architectures": [f"{ARCHITECTURES[name]}ForCausalLM"]}
    return load_architecture(config, origin="config.json")


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
    for name, modules, message in (
        ("qwen3", ("core_attn", "mla_up_proj"), "Qwen3ForCausalLM has mla_up_proj, needs one of core_attn, "),
        ("qwen3_moe", ("shared_experts",), "Qwen3MoeForCausalLM has shared_experts, needs one of core_attn, "),
    ):
        available = ", ".join(recomputable_modules(model_of(name))[1:])
        want = f"trainer.recompute.modules: no layer of {message}{available}"
        assert problems(name, granularity="selective", modules=modules) == [want]


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
