"""Model families: which Hugging Face architectures are supported, and how their tensors map to megatron-core's."""

from __future__ import annotations

SUPPORTED_ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


def supported(architecture: str) -> bool:
    """True where `architecture` (from config.json) can be trained."""
    return architecture in SUPPORTED_ARCHITECTURES
