"""Model families: which Hugging Face architectures there are, and how their tensors map to megatron-core's."""

from __future__ import annotations

SUPPORTED_ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Can be trained, and their transfers planned."""

PLANNED_ARCHITECTURES = (*SUPPORTED_ARCHITECTURES, "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
"""Have a table, from which layouts of any size follow: transfers can be planned."""


def supported(architecture: str) -> bool:
    """True where `architecture` (from config.json) can be trained."""
    return architecture in SUPPORTED_ARCHITECTURES
