"""One random model of each family, trained for some steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.mismatch.measure import MismatchReport, make_report, run_megarl
from benchmarks.mismatch.random_model import build_random_model
from megarl.data.tiny_checkpoint import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 320

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 128}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama"},
    "qwen2": _SIZES | {"model_type": "qwen2"},
    "qwen3": _SIZES | {"model_type": "qwen3"},
    "gemma2": _SIZES
    | {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma3": _SIZES
    | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _SIZES["rope_parameters"]),
        "tie_word_embeddings": True,
    },
    "glm4_moe": _SIZES
    | _EXPERTS
    | {"model_type": "glm4_moe", "n_routed_experts": 8, "first_k_dense_replace": 1, "attention_bias": True}
    | {"use_qk_norm": True, "num_nextn_predict_layers": 0}
    | {"rope_parameters": _SIZES["rope_parameters"] | {"partial_rotary_factor": 0.5}},
    "mixtral": _SIZES | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": _SIZES | _EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8},
    "deepseek_v3": {name: size for name, size in _SIZES.items() if name != "head_dim"}
    | _EXPERTS
    | _LATENT
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "rope_parameters": _YARN,
    },
}
"""Content of config.json by family."""

REPLAYED = {f"{name} R3": name for name, config in FAMILIES.items() if "num_experts_per_tok" in config}
"""Name of a run with `trainer.moe.router_replay: R3` -> its family, of those with experts."""

DIFFERENCES = {"gemma2": "no soft cap in attention, which the CPU engine lacks"}
DIFFERENCES |= dict.fromkeys(REPLAYED, "the engine's experts are replayed")

SHARPNESS = {"gemma2": 0.4, "gemma3_text": 0.4}
"""Factor of the final norm's weight, and with it of the logits, by `model_type`, of those whose norms multiply by
1 + weight and whose heads are tied to the embedding; for all others it is 3."""

OVERRIDES = {
    "algorithm": "{kl_loss: null, group_size: 4, prompts_per_step: 16}",
    "trainer": "{steps: 12, optimizer: {lr: 1.0e-3}}",
    "rollout.max_new_tokens": 24,
    "reward.terms": "{a_to_m: {type: format, pattern: '[a-m]'}}",
    "placement.slots_per_node": 2,
    "data.path": "runs/demo/data/train.jsonl",
}


def run_family(name: str, *, dtype: str, folder: Path) -> MismatchReport:
    """Write a random model of the family, train it, and compare both dtypes in transformers.

    Args:
        name: a key of `FAMILIES` or of `REPLAYED`.
    """
    run_dir = folder / "families" / name.replace(" ", "-")
    model = build(FAMILIES[REPLAYED.get(name, name)])
    model.save_pretrained(run_dir / "model")
    rows = map(json.loads, (folder / "runs/demo/data/train.jsonl").read_text().splitlines())
    tokenizer = train_tokenizer([row["prompt"] for row in rows], vocab_size=VOCABULARY, context_length=512)
    tokenizer.save_pretrained(run_dir / "model")
    (run_dir / "train.yaml").write_text("{}\n")
    paths = {"run_dir": run_dir / "run", "model.path": run_dir / "model", "model.dtype": dtype}
    paths |= {"trainer.moe.router_replay": "R3"} if name in REPLAYED else {}
    stopped_by = run_megarl("train", str(run_dir / "train.yaml"), OVERRIDES | paths, folder=folder)
    report = make_report(
        run_dir / "run", name=name, dtype=dtype, stopped_by=stopped_by, difference=DIFFERENCES.get(name, "")
    )
    return replace(report, rounding_kl=rounding_kl(model, dtype))


def build(config: dict[str, Any]) -> PreTrainedModel:
    """Return a random model in float32 whose logits are scaled by `SHARPNESS`."""
    import torch

    model, kind = build_random_model(config), config["model_type"]
    with torch.no_grad():
        offset = 1.0 if kind in SHARPNESS else 0.0  # of a norm's weight, as stored
        model.model.norm.weight.add_(offset).mul_(SHARPNESS.get(kind, 3.0)).sub_(offset)
    return model


def rounding_kl(model: PreTrainedModel, dtype: str) -> float:
    """Return KL(float32 || dtype) of the next token, mean over random sequences."""
    import torch

    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (16, 48))
    with torch.no_grad():
        exact = model(ids).logits.log_softmax(-1)
        rounded = model.to(getattr(torch, dtype))(ids).logits.float().log_softmax(-1)
    return float((exact.exp() * (exact - rounded)).sum(-1).mean())
