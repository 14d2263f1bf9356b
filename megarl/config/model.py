from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class TinyModelConfig(Section):
    """Sizes of a random Qwen3 model; the defaults make 0.5M parameters."""

    vocab_size: int = Field(default=384, ge=258)
    """Rows of the embedding: 256 bytes, 2 special tokens, and merges."""

    hidden_size: int = Field(default=128, ge=1)
    num_layers: int = Field(default=2, ge=1)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=2)
    ffn_size: int = Field(default=384, ge=1)
    context_length: int = Field(default=512, ge=8)


class ModelConfig(Section):
    """The policy that training starts from."""

    path: str
    """Folder in Hugging Face format: config.json, safetensors, tokenizer."""

    tiny: TinyModelConfig | None = None
    """Where `path` does not exist yet, write a random model of these sizes there, its tokenizer trained on `data.path`:
    a run can be rehearsed without weights."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision. `auto`: bfloat16 on CUDA, float32 on CPU."""
