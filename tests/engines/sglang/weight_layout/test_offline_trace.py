"""Offline traces of SGLang's models, compared with their own loaders, and the trace cache."""

import functools
import json
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.weight_layout import offline_trace
from megarl.engines.sglang.weight_layout.engine_trace import read_traces
from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
from megarl.errors import DataError
from megarl.model_files.weight_index import read_headers
from megarl.reshard.layout.layout import volume
from tests.engines.engine_server import ForkedProcess
from tests.engines.remote import engine_variables, fork_traces, server_address
from tests.engines.sglang.weight_layout import oracle
from tests.errors import expect_error
from tests.megatron.fidelity.models import CONFIGS, save_vision_model
from tests.time_limits import HANG_SECONDS

SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "dtype": "float32",
}
EXPERTS = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
LATENT = {key: value for key, value in CONFIGS["deepseek_v3"].items() if key != "model_type"}
LATENT |= {**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 3}
INDEXER = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 24}
DELTA_NET = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 4}
DELTA_NET |= {"linear_num_value_heads": 8, "shared_expert_intermediate_size": 64, "full_attention_interval": 2}
MODELS = {
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "llama": {},
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 1},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | INDEXER,
    "glm_moe_dsa": LATENT | INDEXER | {"indexer_rope_interleave": True},
    "gemma2": {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3_text": {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8},
    "glm4_moe": EXPERTS | {"num_hidden_layers": 3, "n_routed_experts": 8, "attention_bias": True, "use_qk_norm": True},
    "minimax_m2": {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "gpt_oss": {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "qwen3_next": EXPERTS | DELTA_NET | {"decoder_sparse_step": 1},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": EXPERTS | DELTA_NET,
}
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
READ_BY_SGLANG = {model: {"full_attention_interval": 2} for model in DELTA_NETS}
"""Keys of published config.json files that transformers does not write."""

NO_CPU_ENGINE = (*DELTA_NETS, "gemma3_text", "glm4_moe", "minimax_m2")
CUDA_ONLY = ("deepseek_v32", "glm_moe_dsa")
TP_2_ONLY = ("gemma2", *NO_CPU_ENGINE, *CUDA_ONLY)
CASES = {
    f"{model} {device} tp {tp}": (model, device, tp, {})
    for model in MODELS
    for device in ("cpu", "cuda")
    for tp in (1, 2, 4)
    if (model not in TP_2_ONLY or tp == 2) and (device == "cuda" or model not in CUDA_ONLY)
}
CASES |= {
    f"{model} tp {tp} ep 2": (model, "cpu", tp, {"ep_size": 2})
    for model in ("qwen3_moe", "deepseek_v3")
    for tp in (2, 4)
}
DATA_PARALLEL = {
    "two groups": {"dp_size": 2, "enable_dp_attention": True},
    "four groups, ep 4": {"attn_dp_size": 4, "ep_size": 4, "moe_dense_tp_size": 1, "enable_dp_lm_head": True},
    "deepep": {"attn_dp_size": 2, "ep_size": 4, "moe_dense_tp_size": 1, "moe_a2a_backend": "deepep"},
}
CASES |= {f"deepseek_v3 {name}": ("deepseek_v3", "cuda", 4, options) for name, options in DATA_PARALLEL.items()}
CASES |= {f"{model} cuda two groups": (model, "cuda", 4, {"attn_dp_size": 2}) for model in ("llama", "glm4_moe")}
SAMPLE = {
    label
    for label, (model, device, tp, options) in CASES.items()
    if (tp, options) == (2, {}) and (device == "cuda" or model not in NO_CPU_ENGINE)
}
SAMPLE |= {"qwen2 cuda tp 1", "qwen3 cpu tp 4", "qwen3 cuda tp 4", "deepseek_v3 tp 4 ep 2"}
SAMPLE |= {*(f"deepseek_v3 {name}" for name in DATA_PARALLEL), "llama cuda two groups"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model -> folder that contains only a config.json."""
    root = tmp_path_factory.mktemp("configs")
    for name, changes in MODELS.items():
        config = AutoConfig.for_model(name, **(SIZES | changes), architectures=[ARCHITECTURES[name]])
        config.save_pretrained(root / name)
        written = json.loads((root / name / "config.json").read_text())
        (root / name / "config.json").write_text(json.dumps(written | READ_BY_SGLANG.get(name, {})))
    return {name: str(root / name) for name in MODELS}


@pytest.fixture(scope="module")
def compare(folders, tmp_path_factory):
    """Function that compares all cases of the sample, or all others, in one process."""

    @functools.cache
    def compare(is_sample):
        cases = {
            label: (folders[case[0]], *case[1:]) for label, case in CASES.items() if (label in SAMPLE) == is_sample
        }
        file = tmp_path_factory.mktemp("oracle") / "differences.json"
        variables = engine_variables(EngineSpec(model_path="", tp=4))
        process = ForkedProcess(server_address(), variables, oracle.main, json.dumps(cases), str(file))
        assert process.wait(HANG_SECONDS) == 0
        return json.loads(file.read_text())

    return compare


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=() if label in SAMPLE else pytest.mark.slow) for label in CASES]
)
def test_layout_locates_every_element(compare, label):
    ranks = compare(label in SAMPLE)[label]
    model, device, tp, options = CASES[label]
    assert len(ranks) == tp
    for rank in ranks:
        assert rank["different"] == []
        assert rank["untouched"] == []
        assert len(rank["derived"]) == (9 if model == "gemma2" else 7 if model in DELTA_NETS else 0)
        assert all("norm" in name for name in rank["derived"])
    if device == "cuda" and not options:
        num_vocabularies = {"qwen2": 1, "gemma2": 1, "gemma3_text": 0}.get(model, 2)
        # the first rank adds the biases of down projections
        zero_biases = 2 * 8 * 64 * (tp - 1) if model == "gpt_oss" else 0
        assert sum(rank["padding"] for rank in ranks) == num_vocabularies * 12 * 64 + zero_biases


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_too_few_key_heads_are_replicated_or_padded(folders, device, monkeypatch):
    fork_traces(monkeypatch)
    boxes = [
        [p.box[0] for p in layout.pieces if p.tensor == "model.layers.0.self_attn.k_proj.weight"]
        for layout in trace_layouts(folders["qwen3"], tp=4, device=device)
    ]
    shared = [[(0, 32)], [(0, 32)], [(32, 64)], [(32, 64)]]
    assert boxes == {"cuda": shared, "cpu": [[(0, 32)], [(32, 64)], [], []]}[device]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megarl" / "layouts"


def test_config_json_is_sufficient_and_the_second_trace_comes_from_the_cache(folders, cache, monkeypatch):
    fork_traces(monkeypatch)
    config = str(Path(folders["qwen3_moe"]) / "config.json")
    layouts = trace_layouts(config, tp=2, dtype="bfloat16")
    full_tensors = layouts[0].tensors
    assert {spec.dtype for spec in full_tensors.values()} == {"bfloat16"}
    sharded = [p for p in layouts[0].pieces if volume(p.box) < volume(full_tensors[p.tensor].box)]
    assert any("experts.7.down_proj" in p.tensor for p in sharded)
    (cached,) = cache.iterdir()
    monkeypatch.setattr(offline_trace, "trace_in_child", None)
    assert trace_layouts(folders["qwen3_moe"], tp=2, dtype="bfloat16") == layouts
    with pytest.raises(TypeError):
        trace_layouts(folders["qwen3_moe"], tp=4, dtype="bfloat16")
    assert [len(trace.padding) for trace in read_traces(cached)] == [0, 2]


@pytest.mark.usefixtures("cache")
def test_unknown_model_raises_with_sglangs_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]}))
    with expect_error(DataError, "config.json", "Error"):
        trace_layouts(str(tmp_path), tp=1)


def test_folder_without_config_json_raises(tmp_path):
    with expect_error(DataError, "config.json"):
        trace_layouts(str(tmp_path), tp=1)


@pytest.mark.usefixtures("cache")
def test_layout_leaves_out_the_tensors_of_a_vision_tower(tmp_path, monkeypatch):
    """Training does not change them, and the engine has them from the folder."""
    fork_traces(monkeypatch)
    folder, text = save_vision_model("qwen3_5", tmp_path)
    (layout,) = trace_layouts(folder, tp=1, device="cuda")
    expected = {name.replace("model.", "model.language_model.", 1) for name in read_headers(Path(text))}
    assert set(layout.tensors) - {"lm_head.weight"} == expected
    assert {piece.tensor for piece in layout.pieces} == set(layout.tensors)
