"""Qwen2 and Qwen2.5 (arXiv 2407.10671): queries, keys and values are biased."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.config_json import DecoderConfig


def read(config: Mapping[str, Any], *, origin: str) -> Decoder:
    """See `read_family`."""
    c = DecoderConfig.read(config, origin=origin)
    attention = replace(c.grouped_query_attention(), qkv_bias=True)
    return replace(c.decoder("Qwen2ForCausalLM", origin=origin), attention=attention)
