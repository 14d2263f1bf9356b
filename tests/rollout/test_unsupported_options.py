"""Problems reported for models that SGLang would not run as configured; test_agreement.py shows that it would not."""

import json

import pytest

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.rollout.engine_spec import make_engine_spec
from megarl.rollout.unsupported_options import find_build_problems, find_engine_problems
from tests.megatron.fidelity.models import CONFIGS
from tests.model_files.quantized import QUANTIZATION

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
UNSUPPORTED_ON_CPU = {"gemma2", "deepseek_v3 without query latent"}
UNSUPPORTED = {"qwen3_moe", "qwen3_moe sparse step"}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def hf_config(name, **changes):
    config = CONFIGS[name] | changes
    return {"architectures": [ARCHITECTURES[config["model_type"]]]} | {k: v for k, v in config.items() if v != "absent"}


@pytest.mark.parametrize("name", CONFIGS)
def test_supported_models_have_no_problems(name):
    problems = {
        device: find_engine_problems(hf_config(name), device, origin="config.json") for device in ("cpu", "cuda")
    }
    assert bool(problems["cpu"]) == (name in UNSUPPORTED_ON_CPU | UNSUPPORTED)
    assert bool(problems["cuda"]) == (name in UNSUPPORTED)


@pytest.mark.parametrize(
    ("name", "changes", "device", "problem"),
    [
        (
            "gemma2",
            {"attn_logit_softcapping": "absent"},
            "cpu",
            "placement.device: f: attn_logit_softcapping needs engines on cuda, the CPU engine leaves it out, "
            "got 50.0 on cpu",
        ),
        (
            "gemma2",
            {"hidden_act": "absent"},
            "cuda",
            "model.path: f: SGLang needs hidden_act gelu_pytorch_tanh, got None",
        ),
        (
            "qwen3_moe",
            {},
            "cuda",
            "model.path: f: SGLang does not read mlp_only_layers, it needs to be [], got [1]",
        ),
        (
            "qwen3_moe sparse step",
            {"tie_word_embeddings": False},
            "cpu",
            "model.path: f: SGLang does not read decoder_sparse_step, it needs to be 1, got 2",
        ),
        (
            "qwen3_moe all sparse",
            {"tie_word_embeddings": True},
            "cpu",
            "model.path: f: SGLang does not read tie_word_embeddings, it needs to be False, got True",
        ),
        (
            "gemma2",
            {"tie_word_embeddings": False},
            "cuda",
            "model.path: f: SGLang does not read tie_word_embeddings, it needs to be True, got False",
        ),
        (
            "gemma2",
            {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "cuda",
            "model.path: f: SGLang does not read layer_types, it needs to be ['sliding_attention', 'full_attention'], "
            "got ['full_attention', 'full_attention']",
        ),
        (
            "mixtral",
            {"head_dim": 16},
            "cuda",
            "model.path: f: SGLang does not read head_dim, it needs to be 8, got 16",
        ),
        (
            "mixtral",
            {"rope_parameters": LINEAR},
            "cpu",
            "model.path: f: SGLang does not read how rope is scaled, its type needs to be default, got linear",
        ),
        (
            "deepseek_v3",
            {"moe_layer_freq": "absent"},
            "cuda",
            "model.path: f: SGLang needs moe_layer_freq 1, got None",
        ),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            "cpu",
            "model.path: f: SGLang needs topk_method noaux_tc, got greedy",
        ),
        (
            "deepseek_v3 without query latent",
            {},
            "cpu",
            "placement.device: f: latent attention needs rope type yarn on the CPU engine, got default on cpu",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": LINEAR},
            "cuda",
            "model.path: f: SGLang needs rope type default or yarn, it runs any other as yarn, got linear",
        ),
        (
            "qwen2",
            {"quantization_config": QUANTIZATION},
            "cpu",
            "placement.device: f: weights in FP8 need engines on cuda, SGLang packs them on the CPU, got cpu",
        ),
        (
            "qwen2",
            {"quantization_config": QUANTIZATION | {"scale_fmt": "ue8m0"}},
            "cuda",
            "model.path: f: a weight sync needs quantization_config.scale_fmt None or float, got ue8m0",
        ),
        (
            "qwen2",
            {"quantization_config": QUANTIZATION | {"activation_scheme": "static"}},
            "cuda",
            "model.path: f: a weight sync needs quantization_config.activation_scheme dynamic, got static",
        ),
    ],
)
def test_each_unsupported_option_is_reported(name, changes, device, problem):
    assert find_engine_problems(hf_config(name, **changes), device, origin="f") == [problem]


def test_weights_in_fp8_run_on_cuda():
    assert find_engine_problems(hf_config("qwen2", quantization_config=QUANTIZATION), "cuda", origin="f") == []


def test_gemma2_without_softcapping_runs_on_cpu():
    assert find_engine_problems(hf_config("gemma2", attn_logit_softcapping=None), "cpu", origin="f") == []


def test_make_engine_spec_rejects_an_unsupported_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("gemma2")))
    tree = {"run_dir": "r", "model": {"path": str(tmp_path)}, "data": {"path": "x.jsonl"}}
    config = RunConfig.model_validate(tree)
    assert make_engine_spec(config, 0, "cuda").device == "cuda"
    with pytest.raises(ConfigError, match="attn_logit_softcapping needs engines on cuda"):
        make_engine_spec(config, 0, "cpu")


@pytest.mark.parametrize(
    ("name", "changes", "device", "problems"),
    [
        ("deepseek_v3", {"moe_layer_freq": "absent"}, "cuda", ["f: moe_layer_freq is missing; SGLang needs 1"]),
        ("deepseek_v3", {"topk_method": "absent"}, "cpu", ["f: topk_method is missing; SGLang needs noaux_tc"]),
        (
            "deepseek_v3",
            {"rope_parameters": "absent"},
            "cpu",
            ["f: rope_scaling is missing; without a GPU, SGLang needs rope type yarn for latent attention"],
        ),
        (
            "deepseek_v3 without query latent",
            {},
            "cpu",
            ["f: rope_scaling is missing; without a GPU, SGLang needs rope type yarn for latent attention"],
        ),
        ("deepseek_v3", {"rope_parameters": "absent"}, "cuda", []),
        ("gemma2", {"hidden_act": "absent"}, "cuda", ["f: hidden_act is missing; SGLang needs gelu_pytorch_tanh"]),
        ("gemma2", {"hidden_activation": "absent"}, "cuda", []),
    ],
)
def test_keys_without_which_sglang_builds_no_model(name, changes, device, problems):
    assert find_build_problems(hf_config(name, **changes), device, origin="f") == problems


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_engines_only_ignore_options_of_can_be_built(name):
    assert find_build_problems(hf_config(name), "cuda", origin="config.json") == []
