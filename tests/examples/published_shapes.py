"""Folders in the shape of published models: their config.json, tensors of zeros that take no space, and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.data.tiny_checkpoint import train_tokenizer
from megarl.megatron.families.model_folder import load_architecture_from_folder
from megarl.model_files.header import encode_header

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
    "use_sliding_window": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": QWEN2
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""Hub id -> the keys of its config.json that determine the architecture."""

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def write_published_shape(folder: Path, hub_id: str) -> Path:
    """Write a folder that `megarl check` takes for the model `hub_id`; return it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[hub_id]))
    tensors = {
        name: (spec.shape, spec.dtype)
        for name, spec in load_architecture_from_folder(folder).tensors("bfloat16").items()
    }
    header, stored = encode_header(tensors, folder / "model.safetensors")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(max(tensor.offset + tensor.num_bytes for tensor in stored.values()))
    tokenizer = train_tokenizer(["What is 1 + 1? #### 2"], 300, 32768)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
