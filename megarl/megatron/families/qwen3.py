"""Qwen3, dense (arXiv 2505.09388): each head's query and key are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.config_json import DecoderConfig


def read(config: Mapping[str, Any], *, origin: str) -> Decoder:
    """See `read_family`."""
    c = DecoderConfig.read(config, origin=origin)
    attention = replace(c.grouped_query_attention(), qk_norm=True)
    return replace(c.decoder("Qwen3ForCausalLM", origin=origin), attention=attention)
