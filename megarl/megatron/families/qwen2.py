"""Qwen2 and Qwen2.5 (arXiv 2407.10671): query, key and value projections have biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import PositiveInt

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.model_files.json_object import JsonMapping


class _Config(HfConfig):
    num_key_value_heads: PositiveInt | None = 32


class _MimoConfig(_Config):
    attention_bias: Literal[True] = True  # type: ignore[assignment]


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    return _architecture("Qwen2ForCausalLM", _Config.read(config, origin=origin), origin=origin)


def read_mimo(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture of MiMo-7B (arXiv 2505.07608): Qwen2 with prediction layers under names of their own."""
    model = _architecture("MiMoForCausalLM", _MimoConfig.read(config, origin=origin), origin=origin)
    return replace(model, passed_patterns=("model.mtp_layers.*",))


def _architecture(name: str, c: _Config, *, origin: str) -> ModelArchitecture:
    attention = c.grouped_query_attention(origin=origin, qkv_bias=True)
    return c.to_architecture(name, origin=origin, layers=c.uniform_layers(attention))
