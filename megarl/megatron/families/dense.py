"""Dense decoders with grouped-query attention and a gated MLP: Qwen2 (QKV bias), Qwen3 (q/k norm)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError
from megarl.megatron.families import SUPPORTED_ARCHITECTURES, supported
from megarl.megatron.families.mapping import ParameterMap, Rows
from megarl.reshard.layout import TensorSpec

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel:
    """The sizes and switches that config.json states."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, origin: str) -> DenseModel:
        """Read the content of a config.json; `origin` names it in errors.

        Raises:
            ConfigError: the architecture or one of its options is not supported.
        """
        architecture = (config.get("architectures") or ["(none)"])[0]
        if not supported(architecture):
            raise ConfigError(
                f"{origin}: architecture {architecture} is not supported; supported are "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        _refuse_unsupported_options(config, origin)
        rope = config.get("rope_parameters") or {}
        heads = int(config["num_attention_heads"])
        return cls(
            architecture=architecture,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            ffn_hidden_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
        )

    def tensors(self, dtype: str) -> dict[str, TensorSpec]:
        """Every Hugging Face tensor, in the order of the layers; tied embeddings appear once."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.parameter_names():
            for part in self.parameter_map(name).parts:
                for rows in part:
                    shapes[rows.tensor] = rows.shape
        return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}

    def parameter_names(self) -> list[str]:
        """megatron-core's names of all parameters, layers numbered globally."""
        block = ["input_layernorm.weight", "self_attention.linear_qkv.weight"]
        block += ["self_attention.linear_qkv.bias"] if self.qkv_bias else []
        block += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] if self.qk_norm else []
        block += ["self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"]
        block += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        names = ["embedding.word_embeddings.weight"]
        names += [f"decoder.layers.{i}.{name}" for i in range(self.num_layers) for name in block]
        return [*names, "decoder.final_layernorm.weight", "output_layer.weight"]

    def parameter_map(self, name: str) -> ParameterMap:
        """How the megatron-core parameter `name` (layers numbered globally) is made of Hugging Face tensors."""
        hidden = self.hidden_size
        match name:
            case "embedding.word_embeddings.weight":
                return ParameterMap(((Rows.all("model.embed_tokens.weight", (self.vocab_size, hidden)),),), 0)
            case "output_layer.weight":
                head = "model.embed_tokens.weight" if self.tie_embeddings else "lm_head.weight"
                return ParameterMap(((Rows.all(head, (self.vocab_size, hidden)),),), 0)
            case "decoder.final_layernorm.weight":
                return _whole("model.norm.weight", hidden)
        in_layer = _LAYER.fullmatch(name)
        assert in_layer, name
        return self._layer_map(f"model.layers.{in_layer[1]}.", in_layer[2])

    def _layer_map(self, prefix: str, name: str) -> ParameterMap:
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        match name:
            # Transformer Engine fuses a norm into the linear that follows it, under the linear's name.
            case "input_layernorm.weight" | "self_attention.linear_qkv.layer_norm_weight":
                return _whole(prefix + "input_layernorm.weight", hidden)
            case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
                return _whole(prefix + "post_attention_layernorm.weight", hidden)
            case "self_attention.q_layernorm.weight":
                return _whole(prefix + "self_attn.q_norm.weight", self.head_dim)
            case "self_attention.k_layernorm.weight":
                return _whole(prefix + "self_attn.k_norm.weight", self.head_dim)
            case "self_attention.linear_qkv.weight":
                return self._interleaved_qkv(prefix, "weight", (hidden,))
            case "self_attention.linear_qkv.bias":
                return self._interleaved_qkv(prefix, "bias", ())
            case "self_attention.linear_proj.weight":
                return _columns(prefix + "self_attn.o_proj.weight", hidden, self.num_heads * self.head_dim)
            case "mlp.linear_fc1.weight":
                gate, up = (Rows.all(f"{prefix}mlp.{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
                return ParameterMap(((gate,), (up,)), 0)
            case "mlp.linear_fc2.weight":
                return _columns(prefix + "mlp.down_proj.weight", hidden, ffn)
        raise AssertionError(f"no mapping for megatron-core parameter {prefix}{name}")

    def _interleaved_qkv(self, prefix: str, kind: str, rest: tuple[int, ...]) -> ParameterMap:
        """Per key-value group: its query heads, its key head, its value head."""
        d, per_group = self.head_dim, self.num_heads // self.num_kv_heads
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        rows = []
        for group in range(self.num_kv_heads):
            for x, count in (("q", per_group), ("k", 1), ("v", 1)):
                start = group * count * d
                shape = (heads[x] * d, *rest)
                rows.append(Rows(f"{prefix}self_attn.{x}_proj.{kind}", shape, start, start + count * d))
        return ParameterMap((tuple(rows),), 0)


def _whole(tensor: str, length: int) -> ParameterMap:
    return ParameterMap(((Rows.all(tensor, (length,)),),), None)


def _columns(tensor: str, height: int, width: int) -> ParameterMap:
    return ParameterMap(((Rows.all(tensor, (height, width)),),), 1)


def _refuse_unsupported_options(config: Mapping[str, Any], origin: str) -> None:
    rope = (config.get("rope_parameters") or {}).get("rope_type") or (config.get("rope_scaling") or {}).get("type")
    if rope not in (None, "default"):
        raise ConfigError(f"{origin}: rope type {rope} is not supported; supported is default")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{origin}: hidden_act {config['hidden_act']} is not supported; supported is silu")
    if config.get("use_sliding_window"):
        raise ConfigError(f"{origin}: use_sliding_window is not supported")
    if config.get("attention_bias"):
        raise ConfigError(f"{origin}: attention_bias is not supported")
