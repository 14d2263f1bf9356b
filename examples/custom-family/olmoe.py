"""OLMoE (arXiv 2409.02060), a family outside the package: 64 experts in every layer, norms of all heads together."""

from collections.abc import Mapping
from typing import Any, Literal

from megarl import models


class Config(models.HfConfig):
    """The keys of an OLMoE config.json beyond those of all families."""

    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    clip_qkv: None = None
    rms_norm_eps: float = 1e-5
    attention_bias: Literal[False] = False


def read(config: Mapping[str, Any], *, origin: str) -> models.ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = Config.read(config, origin=origin)
    attention = c.grouped_query_attention(origin=origin, full_qk_norm=True)
    experts = models.MixtureOfExperts(
        hidden_size=c.hidden_size,
        num_experts=c.num_experts,
        ffn_size=c.intermediate_size,
        routing=models.Routing(top_k=c.num_experts_per_tok, norm_topk_prob=c.norm_topk_prob),
    )
    layers = [models.Layer(attention=attention, mlp=experts) for _ in range(c.num_hidden_layers)]
    return c.to_architecture("OlmoeForCausalLM", origin=origin, layers=layers)


FAMILY = models.ModelFamily(architecture="OlmoeForCausalLM", read=read)
