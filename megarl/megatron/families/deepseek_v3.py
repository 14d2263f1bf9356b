"""DeepSeek-V3 (arXiv 2412.19437): MLA, first layers dense, then routed and shared experts, MTP layers.

DeepSeek-V3.2 and GLM-5 add an indexer, which selects the keys that a query attends to.

A published checkpoint also holds a copy of the embedding and of the head for each MTP layer
(`model.layers.61.embed_tokens.weight`, `...shared_head.head.weight`). Trainer and SGLang use those of the main model:
the parameter maps leave the copies out, and an export writes them (`ModelArchitecture.duplicated_tensors`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import ClassVar, Literal, Self, override

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.attention import Indexer, LatentAttention
from megarl.megatron.families.config_json import HfConfig
from megarl.megatron.families.feed_forward import MixtureOfExperts, Routing
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import MTP_KEY, OTHER_MTP_KEY


class _Config(HfConfig):
    other_names: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        OTHER_MTP_KEY: MTP_KEY,
    }

    # Keys with a default have transformers', which SGLang also uses.
    num_key_value_heads: PositiveInt | None = 128
    q_lora_rank: PositiveInt | None = 1536
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    rope_interleave: Literal[True] = True
    n_routed_experts: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 2048
    n_shared_experts: NonNegativeInt = 1
    n_group: PositiveInt = 8
    topk_group: PositiveInt = 4
    routed_scaling_factor: PositiveFloat = 2.5
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: Literal[True] = True
    first_k_dense_replace: NonNegativeInt = 3
    moe_layer_freq: Literal[1] = 1
    num_nextn_predict_layers: NonNegativeInt | None = None

    @property
    def indexer(self) -> Indexer | None:
        """The indexer of each layer."""
        return None

    @property
    def dense_layers(self) -> Container[int]:
        """Numbers of the layers without experts."""
        return range(self.first_k_dense_replace)

    @model_validator(mode="after")
    def _check_group_scores(self) -> Self:
        # A group's score is the sum of its 2 best experts' scores; megatron-core sums the top_k // topk_group best.
        if self.n_group > 1 and self.num_experts_per_tok != 2 * self.topk_group:
            raise ValueError(
                f"num_experts_per_tok needs to be 2 * topk_group with n_group {self.n_group}, got "
                f"{self.num_experts_per_tok} != 2 * {self.topk_group} = {2 * self.topk_group}: megatron-core would "
                "score expert groups differently"
            )
        return self


class _KindsConfig(_Config):
    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}

    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    """Feed-forward kind of each layer, as transformers 5 writes it in place of `first_k_dense_replace`."""

    @property
    @override
    def dense_layers(self) -> Container[int]:
        kinds = self.mlp_layer_types or ("dense",) * self.first_k_dense_replace
        return [number for number, kind in enumerate(kinds) if kind == "dense"]


class _GlmConfig(_KindsConfig):
    other_names: ClassVar[Mapping[str, str]] = {**_KindsConfig.other_names, "head_dim": "qk_rope_head_dim"}

    num_key_value_heads: PositiveInt = 20
    q_lora_rank: PositiveInt | None = 768
    qk_nope_head_dim: PositiveInt = 192
    v_head_dim: PositiveInt = 256
    n_routed_experts: PositiveInt = 64
    moe_intermediate_size: PositiveInt = 1536
    num_experts_per_tok: PositiveInt = 4
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    routed_scaling_factor: PositiveFloat = 1.8
    first_k_dense_replace: Literal[1] = 1  # transformers reads no other one in this model, SGLang does


class _SparseConfig(_KindsConfig):
    attention_kinds = ("full_attention", "indexed_attention")
    num_key_value_heads: PositiveInt = 128
    q_lora_rank: PositiveInt = 1536
    index_n_heads: PositiveInt = 64
    index_head_dim: PositiveInt = 128
    index_topk: PositiveInt = 2048
    indexer_rope_interleave: bool = False
    # Keys that SGLang reads
    index_k_norm_type: Literal["layer"] = "layer"
    index_kpool: Literal[1] = 1

    @model_validator(mode="after")
    def _check_index_head(self) -> Self:
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim needs to be at least qk_rope_head_dim, got {self.index_head_dim} < "
                f"{self.qk_rope_head_dim}"
            )
        return self

    @property
    @override
    def indexer(self) -> Indexer:
        return Indexer(
            num_heads=self.index_n_heads,
            head_dim=self.index_head_dim,
            top_k=self.index_topk,
            interleaved_rope=self.indexer_rope_interleave,
        )


class _V32Config(_SparseConfig):
    indexer_rope_interleave: Literal[False] = False


class _Glm5Config(_SparseConfig):
    num_key_value_heads: PositiveInt = 64
    head_dim: PositiveInt = 64
    q_lora_rank: PositiveInt = 2048
    qk_nope_head_dim: PositiveInt = 192
    v_head_dim: PositiveInt = 256
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    index_n_heads: PositiveInt = 32
    indexer_rope_interleave: Literal[True] = True
    indexer_types: tuple[Literal["full"], ...] | None = None
    index_topk_freq: Literal[1] = 1
    index_topk_pattern: str | tuple[str, ...] | None = None

    @field_validator("index_topk_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if not set(pattern or ()) <= {"F", "full"}:
            raise ValueError(f"index_topk_pattern {pattern} is not supported: each layer needs its own indexer")
        return pattern


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    return _architecture("DeepseekV3ForCausalLM", c, origin=origin)


def read_glm_flash(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture of GLM-4.7-Flash, which has the layers of DeepSeek-V3 and other defaults."""
    return _architecture("Glm4MoeLiteForCausalLM", _GlmConfig.read(config, origin=origin), origin=origin)


def read_v32(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture of DeepSeek-V3.2, which has the layers of DeepSeek-V3 with an indexer."""
    return _architecture("DeepseekV32ForCausalLM", _V32Config.read(config, origin=origin), origin=origin)


def read_glm5(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture of GLM-5, which has the layers of DeepSeek-V3.2 and another RoPE in the indexer."""
    return _architecture("GlmMoeDsaForCausalLM", _Glm5Config.read(config, origin=origin), origin=origin)


def _architecture(name: str, c: _Config, *, origin: str) -> ModelArchitecture:
    attention = LatentAttention(
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        rope=c.rope(origin=origin),
        indexer=c.indexer,
    )
    experts = MixtureOfExperts(
        hidden_size=c.hidden_size,
        num_experts=c.n_routed_experts,
        ffn_size=c.moe_intermediate_size,
        routing=Routing(
            top_k=c.num_experts_per_tok,
            scoring_func="sigmoid",
            num_groups=c.n_group,
            topk_group=c.topk_group,
            routed_scaling_factor=c.routed_scaling_factor,
        ),
        shared_ffn_size=c.moe_intermediate_size * c.n_shared_experts,
        expert_bias=True,
    )
    return c.to_architecture(
        name,
        origin=origin,
        layers=c.uniform_layers(attention, experts=experts, dense=c.dense_layers),
        mtp_layers=(Layer(attention=attention, mlp=experts),) * (c.num_nextn_predict_layers or 0),
    )
