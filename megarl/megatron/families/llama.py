"""Llama 3 (arXiv 2407.21783): nothing but a stretched rotary embedding; Llama 2 lacks even that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.config_json import DecoderConfig


def read(config: Mapping[str, Any], *, origin: str) -> Decoder:
    """See `read_family`."""
    return DecoderConfig.read(config, origin=origin).decoder("LlamaForCausalLM", origin=origin)
