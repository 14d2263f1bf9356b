from __future__ import annotations

from typing import Literal

from megarl.config.section import Section


class ModelConfig(Section):
    """The policy that training starts from."""

    path: str
    """Folder in Hugging Face format: config.json, safetensors, tokenizer."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision. `auto`: bfloat16 on CUDA, float32 on CPU."""
