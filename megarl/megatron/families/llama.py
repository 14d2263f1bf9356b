"""Llama 2 and Llama 3 (arXiv 2407.21783): a plain decoder; Llama 3 scales RoPE."""

from __future__ import annotations

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.model_files.json_object import JsonMapping


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    return HfConfig.read(config, origin=origin).to_architecture("LlamaForCausalLM", origin=origin)
