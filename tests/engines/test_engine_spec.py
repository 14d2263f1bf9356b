"""Engine specs, and problems of models that SGLang would not run as configured: `test_agreement.py` shows some."""

import json
import os
import sys

import numpy as np
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from megarl.config import RunConfig
from megarl.engines.engine_spec import EngineSpec, make_engine_spec
from megarl.engines.sglang.engine_environment import STUBS_FOLDER, make_engine_environment
from megarl.engines.sglang.server_args import make_engine_arguments
from megarl.engines.unsupported_options import find_build_problems, find_engine_problems
from megarl.errors import ConfigError, DataError
from megarl.model_files.model_config import read_stop_token_ids
from tests.errors import expect_error
from tests.megatron.fidelity.models import CONFIGS
from tests.model_files.quantized import INT4, QUANTIZATION


def folder(tmp_path, **files):
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return str(tmp_path)


EVERYWHERE = {
    "config": {"eos_token_id": 3},
    "generation_config": {"eos_token_id": [3, 9]},
    "tokenizer_config": {"eos_token": {"content": "<end>"}},
    "tokenizer": {"added_tokens": [{"id": 12, "content": "<end>"}], "model": {"vocab": {"a": 0}}},
}
IN_THE_VOCABULARY = {
    "config": {"eos_token_id": None},
    "tokenizer_config": {"eos_token": "</s>"},
    "tokenizer": {"added_tokens": [], "model": {"vocab": {"</s>": 2}}},
}

UNDER_TEXT_CONFIG = {"config": {"eos_token_id": 4, "text_config": {"eos_token_id": 3, "vocab_size": 5}}}
"""As in the published folders of Qwen3.5, which have a vision tower."""


@pytest.mark.parametrize(
    ("files", "ids"), [(EVERYWHERE, (3, 9, 12)), (IN_THE_VOCABULARY, (2,)), (UNDER_TEXT_CONFIG, (3, 4))]
)
def test_stop_tokens_are_read_from_every_file(tmp_path, files, ids):
    assert read_stop_token_ids(folder(tmp_path, **files)) == ids


def test_folder_without_a_stop_token_is_rejected(tmp_path):
    with expect_error(DataError, "end-of-sequence", "needs"):
        read_stop_token_ids(folder(tmp_path, config={}))


def test_a_stop_token_beyond_the_vocabulary_of_the_language_model_is_rejected(tmp_path):
    config = {"text_config": {"eos_token_id": 5, "vocab_size": 5}}
    with expect_error(DataError, "config.json: eos_token_id", "vocab_size = 5, got 5"):
        read_stop_token_ids(folder(tmp_path, config=config))


def run_config(path, **rollout):
    tree = {"run_dir": "runs/1", "seed": 7, "model": {"path": path}, "data": {"path": "x.jsonl"}, "rollout": rollout}
    return RunConfig.model_validate(tree | {"placement": {"slots_per_node": 4}})


def test_defaults_depend_on_the_device(tmp_path):
    config = run_config(folder(tmp_path, config={"eos_token_id": 1}), tp=2, replicas=2)
    cpu, cuda = make_engine_spec(config, 1, "cpu"), make_engine_spec(config, 1, "cuda")
    assert (cpu.dtype, cpu.max_total_tokens, cpu.max_running_requests) == ("float32", 65_536, 128)
    assert (cuda.dtype, cuda.max_total_tokens, cuda.max_running_requests) == ("bfloat16", None, None)
    assert (cpu.tp, cpu.seed, cpu.port, cpu.stop_token_ids) == (2, 8, None, (1,))
    assert cpu.log_dir == "runs/1/logs/engine-1"


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63 - 1])
def test_seeds_of_engines_are_those_of_numpy(tmp_path, seed):
    # SGLang seeds numpy's global state, which takes 32 bits
    config = run_config(folder(tmp_path, config={"eos_token_id": 1})).model_copy(update={"seed": seed})
    given = make_engine_arguments(make_engine_spec(config, 1, "cuda"))["random_seed"]
    np.random.RandomState(given)
    assert given == (seed + 1) % 2**32


def test_configured_values_override_defaults(tmp_path):
    engine = {"base_port": 20_000, "max_total_tokens": 100, "max_running_requests": 3, "extra_args": {"page_size": 1}}
    config = run_config(folder(tmp_path, config={"eos_token_id": 1}), engine=engine)
    spec = make_engine_spec(config, 2, "cpu")
    assert (spec.port, spec.max_total_tokens, spec.max_running_requests) == (20_200, 100, 3)
    assert spec.extra_args == {"page_size": 1}


def test_engines_compute_logits_in_float32_if_the_trainer_does(tmp_path):
    config = run_config(folder(tmp_path, config={"eos_token_id": 1}))
    config = config.model_copy(update={"model": config.model.model_copy(update={"fp32_lm_head": True})})
    assert make_engine_spec(config, 0, "cpu").fp32_lm_head
    assert make_engine_arguments(EngineSpec(model_path="m", fp32_lm_head=True))["enable_fp32_lm_head"] is True


def test_extra_arguments_reach_the_engine():
    arguments = make_engine_arguments(EngineSpec(model_path="m", extra_args={"chunked_prefill_size": 64}))
    assert arguments["chunked_prefill_size"] == 64
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["enable_fp32_lm_head"] is False
    assert "nccl_port" not in arguments


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model_path", "rollout.engine.extra_args: model_path: megarl sets this argument itself, from model.path"),
        ("chunked_prefil_size", "no such argument; did you mean chunked_prefill_size"),
        ("pp_size", "pp_size: a weight sync reaches the tensor-parallel ranks of one pipeline stage only"),
    ],
)
def test_invalid_extra_argument_is_rejected(name, message):
    with pytest.raises(ConfigError, match=message):
        make_engine_arguments(EngineSpec(model_path="m", extra_args={name: 1}))


def test_environment_that_reorders_weights_is_rejected(monkeypatch):
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "false")
    make_engine_arguments(EngineSpec(model_path="m"))
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "1")
    with expect_error(ConfigError, "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"):
        make_engine_arguments(EngineSpec(model_path="m"))


def test_stub_folder_comes_first_and_once(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/a{os.pathsep}{STUBS_FOLDER}{os.pathsep}/b")
    variables = make_engine_environment("cpu", 1)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(STUBS_FOLDER), "/a", "/b"]
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in variables


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("expandable_segments:True", ""),
        ("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64"),
        ("roundup_power2_divisions:[256:1,512:2], expandable_segments:True", "roundup_power2_divisions:[256:1,512:2]"),
        ("max_split_size_mb:64", None),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_engines_have_no_expandable_segments(name, given, want, monkeypatch):
    """The memory saver cannot release them; what else the user sets stays."""
    monkeypatch.setenv(name, given)
    assert make_engine_environment("cuda", 1) == ({} if want is None else {name: want})


def test_every_rank_is_bound_to_a_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    assert make_engine_environment("cpu", 3)["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5|4"
    assert make_engine_environment("cuda", 8) == {}


def test_stubs_are_not_on_the_path_of_this_process():
    assert str(STUBS_FOLDER) not in sys.path


UNSUPPORTED_ON_CPU = {"gemma2", "deepseek_v3 without query latent", "minimax_m2"}
UNSUPPORTED_ON_CPU |= {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
UNSUPPORTED_ON_CPU |= {"deepseek_v32", "glm_moe_dsa", "gpt_oss"}
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


def quantized(**changes):
    return {"quantization_config": QUANTIZATION | changes}


def needed(option, needs, got):
    return f"model.path: f: SGLang needs {option} {needs}, got {got}"


SOFTCAPPING = "attn_logit_softcapping needs engines on cuda, the CPU engine leaves it out, got 50.0 on cpu"
YARN = "latent attention needs rope type yarn on the CPU engine, got default on cpu"
SINKS = "attention sinks need engines on cuda, the CPU engine has none, got cpu"
FP8 = "weights in FP8 need engines on cuda, SGLang packs them on the CPU, got cpu"
FULL, ALTERNATING = ["full_attention"] * 2, ["sliding_attention", "full_attention"]
UNSCALED = "model.path: f: SGLang does not read how rope is scaled, its type needs to be default, got linear"
AS_YARN = "default or yarn, it runs any other as yarn"
QUANTIZED = "model.path: f: a weight sync needs quantization_config"
CONVERT = (
    "which a weight sync cannot update; write a folder in bfloat16 first: megarl convert hf-to-megatron, and megarl "
    "convert megatron-to-hf from its output"
)


@pytest.mark.parametrize(
    ("name", "changes", "device", "problem"),
    [
        ("gemma2", {"attn_logit_softcapping": "absent"}, "cpu", f"placement.device: f: {SOFTCAPPING}"),
        ("gemma2", {"hidden_act": "absent"}, "cuda", needed("hidden_act", "gelu_pytorch_tanh", None)),
        ("qwen3_moe", {}, "cuda", unread("mlp_only_layers", [], [1])),
        ("qwen3_moe sparse step", {"tie_word_embeddings": False}, "cpu", unread("decoder_sparse_step", 1, 2)),
        ("qwen3_moe all sparse", {"tie_word_embeddings": True}, "cpu", unread("tie_word_embeddings", False, True)),
        ("gemma2", {"tie_word_embeddings": False}, "cuda", unread("tie_word_embeddings", True, False)),
        ("gemma2", {"num_hidden_layers": 2, "layer_types": FULL}, "cuda", unread("layer_types", ALTERNATING, FULL)),
        ("mixtral", {"head_dim": 16}, "cuda", unread("head_dim", 8, 16)),
        ("mixtral", {"rope_parameters": LINEAR}, "cpu", UNSCALED),
        ("deepseek_v3", {"moe_layer_freq": "absent"}, "cuda", needed("moe_layer_freq", 1, None)),
        ("deepseek_v3", {"topk_method": "greedy"}, "cpu", needed("topk_method", "noaux_tc", "greedy")),
        ("deepseek_v3 without query latent", {}, "cpu", f"placement.device: f: {YARN}"),
        ("deepseek_v3", {"rope_parameters": LINEAR}, "cuda", needed("rope type", AS_YARN, "linear")),
        ("glm_moe_dsa", {"indexer_rope_interleave": "absent"}, "cuda", needed("indexer_rope_interleave", True, None)),
        (
            "deepseek_v32",
            {},
            "cpu",
            "placement.device: f: the indexer of DeepseekV32ForCausalLM needs engines on cuda, got cpu",
        ),
        ("gpt_oss", {}, "cpu", f"placement.device: f: {SINKS}"),
        ("gpt_oss", {"tie_word_embeddings": True}, "cuda", unread("tie_word_embeddings", False, True)),
        ("qwen2", quantized(), "cpu", f"placement.device: f: {FP8}"),
        ("qwen2", quantized(scale_fmt="ue8m0"), "cuda", f"{QUANTIZED}.scale_fmt None or float, got ue8m0"),
        ("qwen2", quantized(activation_scheme="static"), "cuda", f"{QUANTIZED}.activation_scheme dynamic, got static"),
        ("qwen2", quantized(quant_method="mxfp4"), "cuda", f"model.path: f: engines would run in MXFP4, {CONVERT}"),
        ("qwen2", {"quantization_config": INT4}, "cpu", f"model.path: f: engines would run in INT4, {CONVERT}"),
        (
            "qwen2",
            {"text_config": {"quantization_config": INT4}},
            "cuda",
            f"model.path: f: engines would run in INT4, {CONVERT}",
        ),
    ],
)
def test_each_unsupported_option_is_reported(name, changes, device, problem):
    assert find_engine_problems(hf_config(name, **changes), device, origin="f") == [problem]


OPTIONS_THAT_RUN = [("qwen2", quantized(), "cuda"), ("gemma2", {"attn_logit_softcapping": None}, "cpu")]


@pytest.mark.parametrize(("name", "changes", "device"), OPTIONS_THAT_RUN)
def test_options_that_run_are_not_reported(name, changes, device):
    assert find_engine_problems(hf_config(name, **changes), device, origin="f") == []


def test_make_engine_spec_rejects_an_unsupported_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("gemma2")))
    config = run_config(str(tmp_path))
    assert make_engine_spec(config, 0, "cuda").device == "cuda"
    with expect_error(ConfigError, "attn_logit_softcapping"):
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
