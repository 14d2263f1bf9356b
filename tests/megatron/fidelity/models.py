"""Tiny random models of every family, saved by transformers, on which Megatron and the engines are compared.

Sizes do not divide each other by accident: six heads, vocabularies of 331 and 509, a head_dim that is not
hidden / heads. Sizes of heads are multiples of 8, as attention kernels of GPUs need. All models support tp 2, ep 4 and
four pipeline chunks. Positions go up to 4,096, so that long sequences fit; RoPE scaling starts at 128, so that it
affects short sequences.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.mismatch.random_model import build_random_model as build

_TOKENS: dict[str, Any] = {"vocab_size": 331, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
_SIZES = _TOKENS | _HEADS | {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4}
_SIZES |= {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_SCALED = {"rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 128}
_YARN = _SCALED | {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}

_QWEN2 = _SIZES | {"model_type": "qwen2", "rope_parameters": _PLAIN | {"rope_theta": 1e6}}
_QWEN3 = _QWEN2 | {"model_type": "qwen3", "head_dim": 16}
_QWEN3_MOE = _QWEN3 | {"model_type": "qwen3_moe", "norm_topk_prob": True}
_QWEN3_MOE |= {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 20, "kv_lora_rank": 28, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
# megatron-core scores an expert group by its topk / topk_group best experts, transformers by its two best
_ROUTING = {
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# as published folders have them; SGLang reads them
_READ_BY_SGLANG = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_EXPERTS = {"moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
_DEEPSEEK_V3 = _SIZES | _LATENT | _ROUTING | _READ_BY_SGLANG | _EXPERTS
_DEEPSEEK_V3 |= {"model_type": "deepseek_v3", "num_key_value_heads": 6, "num_nextn_predict_layers": 1}
_DEEPSEEK_V3 |= {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
_DEEPSEEK_V32 = _DEEPSEEK_V3 | {
    "model_type": "deepseek_v32",
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 24,
}
_LLAMA3 = _SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SOFTCAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
_TIED = {"tie_word_embeddings": True}
# a larger epsilon: outputs near zero of a delta net's heads are normalized, which amplifies rounding by 1 / sqrt(eps)
_DELTA_NET = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
_DELTA_NET |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "rms_norm_eps": 1e-4}
_DELTA_NET |= {"full_attention_interval": 2}
_DELTA_NET |= {"rope_parameters": _PLAIN | {"partial_rotary_factor": 0.25}}
_QWEN3_NEXT = _QWEN3 | _DELTA_NET | {"model_type": "qwen3_next", "moe_intermediate_size": 24, "num_experts": 8}
_QWEN3_NEXT |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 40}

TWO_DTYPES = "qwen3_5 in two dtypes"
"""Model whose folder, in bfloat16, stores the decays and norms of its gated delta nets in float32, as published.

It is not among `CONFIGS`, whose folders are float32.
"""

STACKED = "qwen3_5_moe stacked"
"""The model qwen3_5_moe in a folder whose tensors have all experts of a layer, as published."""

OWN_HEAD = "qwen3 with a head of its own"
"""Model whose config.json ties the head to the embedding, and whose folder stores another head."""

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN2 | _TIED | {"num_key_value_heads": 1},
    "qwen2 linear": _QWEN2 | {"vocab_size": 509, "rope_parameters": _LINEAR},
    "qwen3": _QWEN3 | _TIED,
    OWN_HEAD: _QWEN3 | _TIED,
    "qwen3 yarn": _QWEN3 | {"vocab_size": 509, "num_key_value_heads": 1, "rope_parameters": _YARN},
    "llama3": _SIZES | _TIED | {"model_type": "llama", "vocab_size": 509, "rope_parameters": _LLAMA3},
    "gemma2": {
        **(_SIZES | _TIED | _SOFTCAPS),
        "model_type": "gemma2",
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",  # as published folders have it; SGLang reads it
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "rope_parameters": _PLAIN,
    },
    "qwen3_moe": _QWEN3_MOE | {"mlp_only_layers": [1]},
    "qwen3_moe all sparse": _QWEN3_MOE | {"vocab_size": 509},
    "qwen3_moe sparse step": (_QWEN3_MOE | _TIED)
    | {"vocab_size": 509, "num_key_value_heads": 1, "norm_topk_prob": False, "decoder_sparse_step": 2},
    "mixtral": _SIZES
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_parameters": _PLAIN},
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": _DEEPSEEK_V32
    | {"model_type": "glm_moe_dsa", "vocab_size": 509, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"rope_parameters": _PLAIN, "indexer_rope_interleave": True},
    "gemma3": {
        **(_SIZES | _TIED),
        "model_type": "gemma3_text",
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"sliding_attention": _PLAIN, "full_attention": _LINEAR},
    },
    "glm4_moe": _QWEN3
    | {"model_type": "glm4_moe", "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2}
    | {"routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1}
    | {"num_nextn_predict_layers": 1, "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5}},
    "minimax_m2": _SIZES
    | {"model_type": "minimax_m2", "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5}, "rotary_dim": 8, "scoring_func": "sigmoid"}
    | {"use_qk_norm": True, "use_routing_bias": True},
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3 | _DELTA_NET | {"model_type": "qwen3_5_text"} | _TIED,
    "qwen3_5_moe": _QWEN3_NEXT | {"model_type": "qwen3_5_moe_text", "vocab_size": 509},
    "gpt_oss": _QWEN3
    | {"model_type": "gpt_oss", "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"sliding_window": 8, "swiglu_limit": 0.7, "rope_parameters": _YARN | {"truncate": False}},
    "deepseek_v3 without query latent": _DEEPSEEK_V3
    | {"vocab_size": 509, "q_lora_rank": None, "num_nextn_predict_layers": 0, "rope_parameters": _PLAIN}
    | {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}
"""Content of config.json by model name."""


_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48}
_TOWER |= {"num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": []}
VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": _TOWER,
    "qwen3_5_moe": _TOWER,
    "gemma3": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"image_size": 16, "patch_size": 4},
}
"""Vision tower, by name of the language model, of models that have both."""


def save_vision_model(name: str, root: Path) -> tuple[str, str]:
    """Save the model with a vision tower whose language model is that of `save_model`; return both folders.

    Args:
        name: a key of `VISION`, or `STACKED`.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder, text = root / f"{name.replace(' ', '-')}-vision", save_model(name, root)
    is_stacked, name = name == STACKED, "qwen3_5_moe" if name == STACKED else name
    model_type = CONFIGS[name]["model_type"].removesuffix("_text")
    tied = {"tie_word_embeddings": CONFIGS[name]["tie_word_embeddings"]}
    config = AutoConfig.for_model(model_type, text_config=CONFIGS[name], vision_config=VISION[name], **tied)
    model = AutoModelForImageTextToText.from_config(config, dtype=build(CONFIGS[name]).dtype)
    missing = model.load_state_dict(_nested(build(CONFIGS[name]).state_dict()), strict=False)
    assert not missing.unexpected_keys, missing.unexpected_keys
    model.save_pretrained(folder, save_original_format=not is_stacked)
    _write_interval(name, folder / "config.json")
    saved = load_file(folder / "model.safetensors")
    assert len(saved) > len(load_file(Path(text) / "model.safetensors"))
    return str(folder), text


def _nested(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a language model under their names in a model with a vision tower."""
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}


def save_model(name: str, root: Path) -> str:
    """Return the folder of model `name` under `root`; the first call writes it."""
    folder = root / name.replace(" ", "-")
    if name == TWO_DTYPES:
        return _save_in_two_dtypes(folder)
    if name == STACKED:
        build(CONFIGS["qwen3_5_moe"]).save_pretrained(folder, save_original_format=False)
        _write_interval("qwen3_5_moe", folder / "config.json")
        return str(folder)
    if not (folder / "model.safetensors").exists():
        build(CONFIGS[name]).save_pretrained(folder)
        _write_interval(name, folder / "config.json")
        if CONFIGS[name].get("num_nextn_predict_layers"):
            append_prediction_layer(folder / "model.safetensors", CONFIGS[name])
        if name == OWN_HEAD:
            append_head(folder / "model.safetensors")
    return str(folder)


def _save_in_two_dtypes(folder: Path) -> str:
    """Save the model `TWO_DTYPES`, if the folder has none; return the folder."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    if not file.exists():
        build(CONFIGS["qwen3_5"] | {"mamba_ssm_dtype": "float32"}).save_pretrained(folder)
        _write_interval("qwen3_5", folder / "config.json")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        tensors = {n: t if is_float32(n) else t.bfloat16() for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def is_float32(name: str) -> bool:
    """Return whether a published Qwen3.5 folder stores the tensor in float32."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


def _write_interval(name: str, file: Path) -> None:
    """Write the interval of layers with full attention, which SGLang reads and transformers does not write."""
    described = json.loads(file.read_text())
    if "full_attention_interval" in CONFIGS[name]:
        described.get("text_config", described)["full_attention_interval"] = CONFIGS[name]["full_attention_interval"]
        file.write_text(json.dumps(described))


def save_value_model(name: str, root: Path) -> str:
    """As `save_model`, for a value model (one scalar per token)."""
    folder = root / f"{name.replace(' ', '-')}-value"
    if not (folder / "model.safetensors").exists():
        build(CONFIGS[name], values=True).save_pretrained(folder)
    return str(folder)


def append_head(file: Path) -> None:
    """Add a random output head, which transformers does not save for a tied model."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    words = tensors["model.embed_tokens.weight"]
    head = 0.2 * torch.randn(words.shape, generator=torch.Generator().manual_seed(2))
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})


def append_prediction_layer(file: Path, config: dict[str, Any]) -> None:
    """Add a multi-token-prediction layer under its published names, since transformers does not create one."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    last, added = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Any:
        return 0.3 * torch.randn(shape, generator=generator)

    inner = {added + name.removeprefix(last): draw(*t.shape) for name, t in tensors.items() if name.startswith(last)}
    norms = {f"{added}{name}.weight": 1 + draw(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    # published folders repeat these two
    copies = {
        f"{added}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{added}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    added_tensors = inner | norms | copies | {f"{added}eh_proj.weight": draw(hidden, 2 * hidden)}
    save_file(tensors | added_tensors, file, metadata={"format": "pt"})
