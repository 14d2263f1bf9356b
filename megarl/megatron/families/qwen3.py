"""Dense Qwen3 models (arXiv 2505.09388): the query and key of each head are normalized."""

from __future__ import annotations

from pydantic import PositiveInt

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.model_files.json_object import JsonMapping


class _Config(HfConfig):
    num_key_value_heads: PositiveInt | None = 32
    head_dim: PositiveInt = 128


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    attention = c.grouped_query_attention(origin=origin, qk_norm=True)
    return c.to_architecture("Qwen3ForCausalLM", origin=origin, layers=c.uniform_layers(attention))
