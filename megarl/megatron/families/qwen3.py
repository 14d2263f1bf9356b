"""Dense Qwen3 models (arXiv 2505.09388): the query and key of each head are normalized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.config_json import HfConfig


def read(config: Mapping[str, Any], *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = HfConfig.read(config, origin=origin)
    attention = replace(c.grouped_query_attention(), qk_norm=True)
    return replace(c.to_architecture("Qwen3ForCausalLM", origin=origin), attention=attention)
