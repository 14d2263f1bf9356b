"""Problems reported for models that SGLang would not run as configured; test_agreement.py shows that it would not."""

import json

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.rollout.engine_spec import make_engine_spec
from megarl.rollout.unsupported_options import find_build_problems, find_engine_problems
from tests.megatron.fidelity.models import CONFIGS
from tests.model_files.quantized import QUANTIZATION

UNSUPPORTED_ON_CPU = {"gemma2", "deepseek_v3 without query latent"}
UNSUPPORTED = {"qwen3_moe", "qwen3_moe sparse step"}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def hf_config(name, **changes):
    config = CONFIGS[name] | changes
    return {"architectures": [ARCHITECTURES[config["model_type"]]]} | {k: v for k, v in config.items() if v != "absent"}


@pytest.mark.parametrize("name", CONFIGS)
def test_supported_models_have_no_problems(name):
    config = hf_config(name)
    assert bool(find_engine_problems(config, "cpu", origin="f")) == (name in UNSUPPORTED_ON_CPU | UNSUPPORTED)
    assert bool(find_engine_problems(config, "cuda", origin="f")) == (name in UNSUPPORTED)
    assert find_build_problems(config, "cuda", origin="f") == []  # also where engines only ignore an option


def unread(option, needs, got):
    return f"model.path: f: SGLang does not read {option}, it needs to be {needs}, got {got}"


def needed(option, needs, got):
    return f"model.path: f: SGLang needs {option} {needs}, got {got}"


SOFTCAPPING = "attn_logit_softcapping needs engines on cuda, the CPU engine leaves it out, got 50.0 on cpu"
YARN = "latent attention needs rope type yarn on the CPU engine, got default on cpu"
FP8 = "weights in FP8 need engines on cuda, SGLang packs them on the CPU, got cpu"
FULL = ["full_attention"] * 2
QUANTIZED = "model.path: f: a weight sync needs quantization_config"


@pytest.mark.parametrize(
    ("name", "changes", "device", "problem"),
    [
        ("gemma2", {"attn_logit_softcapping": "absent"}, "cpu", f"placement.device: f: {SOFTCAPPING}"),
        ("gemma2", {"hidden_act": "absent"}, "cuda", needed("hidden_act", "gelu_pytorch_tanh", None)),
        ("qwen3_moe", {}, "cuda", unread("mlp_only_layers", [], [1])),
        ("qwen3_moe sparse step", {"tie_word_embeddings": False}, "cpu", unread("decoder_sparse_step", 1, 2)),
        ("qwen3_moe all sparse", {"tie_word_embeddings": True}, "cpu", unread("tie_word_embeddings", False, True)),
        ("gemma2", {"tie_word_embeddings": False}, "cuda", unread("tie_word_embeddings", True, False)),
        (
            "gemma2",
            {"num_hidden_layers": 2, "layer_types": FULL},
            "cuda",
            unread("layer_types", ["sliding_attention", "full_attention"], FULL),
        ),
        ("mixtral", {"head_dim": 16}, "cuda", unread("head_dim", 8, 16)),
        (
            "mixtral",
            {"rope_parameters": LINEAR},
            "cpu",
            "model.path: f: SGLang does not read how rope is scaled, its type needs to be default, got linear",
        ),
        ("deepseek_v3", {"moe_layer_freq": "absent"}, "cuda", needed("moe_layer_freq", 1, None)),
        ("deepseek_v3", {"topk_method": "greedy"}, "cpu", needed("topk_method", "noaux_tc", "greedy")),
        ("deepseek_v3 without query latent", {}, "cpu", f"placement.device: f: {YARN}"),
        (
            "deepseek_v3",
            {"rope_parameters": LINEAR},
            "cuda",
            needed("rope type", "default or yarn, it runs any other as yarn", "linear"),
        ),
        ("qwen2", {"quantization_config": QUANTIZATION}, "cpu", f"placement.device: f: {FP8}"),
        (
            "qwen2",
            {"quantization_config": QUANTIZATION | {"scale_fmt": "ue8m0"}},
            "cuda",
            f"{QUANTIZED}.scale_fmt None or float, got ue8m0",
        ),
        (
            "qwen2",
            {"quantization_config": QUANTIZATION | {"activation_scheme": "static"}},
            "cuda",
            f"{QUANTIZED}.activation_scheme dynamic, got static",
        ),
    ],
)
def test_each_unsupported_option_is_reported(name, changes, device, problem):
    assert find_engine_problems(hf_config(name, **changes), device, origin="f") == [problem]


@pytest.mark.parametrize(
    ("name", "changes", "device"),
    [
        ("qwen2", {"quantization_config": QUANTIZATION}, "cuda"),
        ("gemma2", {"attn_logit_softcapping": None}, "cpu"),
    ],
)
def test_options_that_run_are_not_reported(name, changes, device):
    assert find_engine_problems(hf_config(name, **changes), device, origin="f") == []


def test_make_engine_spec_rejects_an_unsupported_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("gemma2")))
    tree = {"run_dir": "r", "model": {"path": str(tmp_path)}, "data": {"path": "x.jsonl"}}
    config = RunConfig.model_validate(tree)
    assert make_engine_spec(config, 0, "cuda").device == "cuda"
    with pytest.raises(ConfigError, match="attn_logit_softcapping needs engines on cuda"):
        make_engine_spec(config, 0, "cpu")


NEEDS_YARN = ["f: rope_scaling is missing; without a GPU, SGLang needs rope type yarn for latent attention"]


@pytest.mark.parametrize(
    ("name", "changes", "device", "problems"),
    [
        ("deepseek_v3", {"moe_layer_freq": "absent"}, "cuda", ["f: moe_layer_freq is missing; SGLang needs 1"]),
        ("deepseek_v3", {"topk_method": "absent"}, "cpu", ["f: topk_method is missing; SGLang needs noaux_tc"]),
        ("deepseek_v3", {"rope_parameters": "absent"}, "cpu", NEEDS_YARN),
        ("deepseek_v3 without query latent", {}, "cpu", NEEDS_YARN),
        ("deepseek_v3", {"rope_parameters": "absent"}, "cuda", []),
        ("gemma2", {"hidden_act": "absent"}, "cuda", ["f: hidden_act is missing; SGLang needs gelu_pytorch_tanh"]),
        ("gemma2", {"hidden_activation": "absent"}, "cuda", []),
    ],
)
def test_keys_without_which_sglang_builds_no_model(name, changes, device, problems):
    assert find_build_problems(hf_config(name, **changes), device, origin="f") == problems
