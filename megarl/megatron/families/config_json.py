"""The keys of config.json that all families share, validated and with Hugging Face's defaults."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from megarl.errors import ConfigError
from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.attention import Attention, GroupedQueryAttention, Rope
from megarl.megatron.families.feed_forward import GatedMlp, MixtureOfExperts
from megarl.model_files.json_object import JsonMapping, JsonObject

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"]
"""Torch name of the dtype that weights are stored in."""

OTHER_FEATURES: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "attention_chunk_size": ("attention in chunks", (None, 0)),
    "attention_multiplier": ("another scale of attention scores", (None,)),
    "attn_logit_softcapping": ("capped attention scores", (None, 0)),
    "attn_output_gate": ("gates of the attention output", (None, False)),
    "attn_type_list": ("layers without softmax attention", (None, 1)),
    "clip_qkv": ("clipped queries, keys and values", (None,)),
    "embedding_multiplier": ("scaled embeddings", (None, 1)),
    "final_logit_softcapping": ("capped logits", (None, 0)),
    "hidden_act_alpha": ("another factor of the activation", (None,)),
    "index_topk": ("selected keys", (None,)),
    "is_causal": ("attention in both directions", (None, True)),
    "llama_4_scaling": ("queries scaled by position", (None,)),
    "logit_scale": ("scaled logits", (None, 1)),
    "logits_scaling": ("scaled logits", (None, 1)),
    "mla_nope": ("layers without RoPE", (None, False)),
    "no_rope_layer_interval": ("layers without RoPE", (None, 0)),
    "no_rope_layers": ("layers without RoPE", (None, 1)),
    "num_hash_layers": ("experts chosen by token", (None, 0)),
    "num_kv_shared_layers": ("layers that share keys and values", (None, 0)),
    "qk_layernorm": ("norms of queries and keys", (None, False)),
    "query_pre_attn_scalar": ("another scale of attention scores", (None,)),
    "residual_multiplier": ("scaled residuals", (None, 1)),
    "rope_is_neox_style": ("RoPE of neighboring dimensions", (None, True)),
    "scale_depth": ("scaled residuals", (None,)),
    "scale_emb": ("scaled embeddings", (None, 1)),
    "swiglu_limit": ("clamped MLPs", (None, 0)),
    "use_bidirectional_attention": ("attention in both directions", (None, False)),
    "use_qk_norm": ("norms of queries and keys", (None, False)),
}
"""Key of config.json that some families read -> the feature that it states, and the values without effect.

A family that declares the key reads it. In others a value with effect raises an error: transformers would ignore it in
most, but the folder's weights may have been trained with the feature, and SGLang reads some keys in all families. Of a
list, each entry counts.
"""


def effective_features(config: JsonMapping) -> Iterator[tuple[str, object, str]]:
    """Yield key, value and feature for each of `OTHER_FEATURES` that a config.json states with effect."""
    for key, (feature, neutral) in OTHER_FEATURES.items():
        stated = config.get(key)
        entries = stated if isinstance(stated, list) else [stated]
        if not all(entry in neutral for entry in entries):
            yield key, stated, feature


class HfConfig(BaseModel):
    """config.json of a decoder with rotary embeddings and a gated MLP; families add their own keys and defaults.

    Examples:
        >>> config = {
        ...     "num_hidden_layers": 2,
        ...     "hidden_size": 64,
        ...     "intermediate_size": 128,
        ...     "num_attention_heads": 4,
        ...     "vocab_size": 256,
        ...     "max_position_embeddings": 512,
        ...     "rms_norm_eps": 1e-5,
        ... }
        >>> HfConfig.read(config, origin="config.json").to_architecture("LlamaForCausalLM", origin="").num_layers
        2
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), strict=True, allow_inf_nan=False)

    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    original_max_position_embeddings: PositiveInt | None = None
    """Positions before RoPE scaling, outside of its parameters."""
    partial_rotary_factor: float | None = None
    """A RoPE parameter outside of the others."""
    rms_norm_eps: PositiveFloat
    tie_word_embeddings: bool = False
    rope_theta: PositiveFloat | None = None
    rope_scaling: JsonObject | None = None
    """RoPE scaling as transformers 4 writes it."""
    rope_parameters: JsonObject | None = None
    """RoPE parameters as transformers 5 writes them, `rope_theta` included."""

    dtype: DtypeName | None = None
    torch_dtype: DtypeName | None = None

    # Options that change what layers compute or hold: any other value raises an error that names the key.
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    layer_types: tuple[str, ...] | None = None

    attention_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Supported entries of `layer_types`."""
    default_theta: ClassVar[float] = 10000.0
    """Hugging Face's default of `rope_theta`."""
    partial_rotary: ClassVar[bool] = False
    """The family may rotate a part of a head's dimensions."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Other name that transformers accepts for a key -> the key."""

    @classmethod
    def read(cls, config: JsonMapping, *, origin: str) -> Self:
        """Validate the content of a config.json; `origin` is its name in error messages.

        Raises:
            ConfigError: keys are missing, have the wrong type or set unsupported options; one line each.
        """
        problems = [*cls._find_other_features(config), *cls._find_differing_names(config)]
        if problems:
            raise ConfigError("\n".join(f"{origin}: {problem}" for problem in problems))
        renamed = {cls.other_names[name]: value for name, value in config.items() if name in cls.other_names}
        try:
            return cls.model_validate_json(json.dumps({**config, **renamed}))  # strict: lists are tuples only in JSON
        except ValidationError as e:
            raise ConfigError("\n".join(f"{origin}: {_error_message(error)}" for error in e.errors())) from e

    @classmethod
    def _find_other_features(cls, config: JsonMapping) -> Iterator[str]:
        for key, stated, feature in effective_features(config):
            if key not in cls.model_fields:
                yield f"{key} {stated} is not supported: layers of this architecture have no {feature}"

    @classmethod
    def _find_differing_names(cls, config: JsonMapping) -> Iterator[str]:
        for name, key in cls.other_names.items():
            if name in config and key in config and config[name] != config[key]:
                yield f"{name} {config[name]} and {key} {config[key]} differ; they are names of one key, remove one"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        heads, kv_heads = self.num_attention_heads, self.kv_heads
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads needs to divide num_attention_heads, got {heads} % {kv_heads} = "
                f"{heads % kv_heads}"
            )
        return self

    @field_validator("layer_types")
    @classmethod
    def _check_layer_types(cls, kinds: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for kind in dict.fromkeys(kinds or ()):
            if kind not in cls.attention_kinds:
                raise ValueError(
                    f"layer_types {kind} is not supported; supported is {' or '.join(cls.attention_kinds)}"
                )
        return kinds

    @model_validator(mode="after")
    def _check_rope_scaling(self) -> Self:
        # transformers takes rope_scaling then, others rope_parameters
        scaling, parameters = self.rope_scaling, self.rope_parameters
        if scaling and parameters:
            theta = scaling.get("rope_theta", self.rope_theta or self.default_theta)
            if _scaling_of(scaling) != _scaling_of(parameters) or parameters.get("rope_theta", theta) != theta:
                raise ValueError("rope_scaling and rope_parameters differ; remove one of them")
        rotated, within = self.partial_rotary_factor, (parameters or {}).get("partial_rotary_factor")
        # transformers takes that of rope_parameters then, SGLang the other one in some families
        if {"partial_rotary_factor"} <= self.model_fields_set and None not in (rotated, within) and rotated != within:
            raise ValueError(
                f"partial_rotary_factor {rotated} and rope_parameters.partial_rotary_factor {within} differ; remove one"
            )
        return self

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads; null means the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    def to_architecture(
        self, name: str, *, origin: str, layers: Iterable[Layer] | None = None, **features: Any
    ) -> ModelArchitecture:
        """Return the architecture of a decoder.

        Args:
            name: Hugging Face's name of the architecture.
            layers: its layers; by default all have grouped-query attention and a gated MLP.
            features: further fields of `ModelArchitecture`.

        Raises:
            ConfigError: the RoPE type is not supported, or a parameter is missing or no number.
        """
        if layers is None:
            layers = self.uniform_layers(self.grouped_query_attention(origin=origin))
        return ModelArchitecture(
            name=name,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_position_embeddings,
            norm_eps=self.rms_norm_eps,
            tie_embeddings=self.tie_word_embeddings,
            layers=tuple(layers),
            **features,
        )

    def rope(self, *, origin: str) -> Rope:
        """Return the rotary position embedding of all layers.

        Raises:
            ConfigError: the RoPE type is not supported, or a parameter is missing or no number.
        """
        stated = {**(self.rope_scaling or {}), **(self.rope_parameters or {})}
        if self.partial_rotary_factor is not None:
            stated.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if self.original_max_position_embeddings is not None:
            stated["original_max_position_embeddings"] = self.original_max_position_embeddings
        return Rope.read(
            stated,
            theta=self.rope_theta or self.default_theta,
            max_positions=self.max_position_embeddings,
            origin=origin,
            partial=self.partial_rotary,
        )

    def grouped_query_attention(
        self, *, origin: str, rope: Rope | None = None, **features: Any
    ) -> GroupedQueryAttention:
        """Return grouped-query attention, by default without biases and query/key norms.

        Args:
            rope: rotary position embedding; None: that of all layers.
            features: further fields of `GroupedQueryAttention`.
        """
        return GroupedQueryAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            rope=rope or self.rope(origin=origin),
            **features,
        )

    def uniform_layers(
        self, attention: Attention, *, experts: MixtureOfExperts | None = None, dense: Container[int] = ()
    ) -> list[Layer]:
        """Return layers with the same attention.

        Args:
            experts: feed-forward of the layers that are not `dense`; None: all layers have the gated MLP.
            dense: numbers of the layers with the gated MLP.
        """
        mlp = self.gated_mlp()
        return [
            Layer(attention=attention, mlp=mlp if experts is None or i in dense else experts)
            for i in range(self.num_hidden_layers)
        ]

    def gated_mlp(self, **features: Any) -> GatedMlp:
        """Return the gated MLP of a layer without experts; `features`: further fields of `GatedMlp`."""
        return GatedMlp(hidden_size=self.hidden_size, ffn_size=self.intermediate_size, **features)


def _scaling_of(parameters: JsonObject) -> JsonObject:
    """Return RoPE parameters without the base of the frequencies, with the type under one name."""
    rest = {name: value for name, value in parameters.items() if name not in ("type", "rope_type", "rope_theta")}
    return rest | {"rope_type": parameters.get("rope_type") or parameters.get("type") or "default"}


def _error_message(error: ErrorDetails) -> str:
    where = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "literal_error":
            supported = error["ctx"]["expected"].replace("'", "")
            return f"{where} {error['input']} is not supported; supported is {supported}"
        case "value_error":
            return str(error["ctx"]["error"])
    return f"{where}: {error['msg']}, got {error['input']!r}"
