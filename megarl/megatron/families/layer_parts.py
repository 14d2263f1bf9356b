"""The interface of a decoder layer's parts, which know their parameters' megatron-core and Hugging Face names.

megatron-core names are relative to the layer (`self_attention.linear_qkv.weight`), with global expert numbers, and have
two spellings. Transformer Engine fuses a norm into the linear that follows it (`...linear_qkv.layer_norm_weight`), and
its grouped linear has the expert number at the end (`mlp.experts.linear_fc1.weight7`). Torch-only layers have separate
norms (`input_layernorm.weight`) and one module per expert. `map_parameter` accepts both, `parameter_names` returns the
latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from megarl.megatron.families.parameter_map import ParameterMap


@dataclass(frozen=True, slots=True)
class ShardingUnit:
    """Indivisible units of a tensor, such as heads or experts, that parallel ranks must divide evenly."""

    description: str
    """Text for error messages, e.g. `model.layers.0.self_attn.q_proj.weight has query heads`."""
    total: int
    """Number of units in the full tensor."""
    axis: Literal["tp", "etp", "ep"]
    """Parallel dimension that divides the units."""
    can_replicate: bool = False
    """Several ranks may hold the same unit if there are more ranks than units."""


class LayerPart(Protocol):
    """A part of a decoder layer; `prefix` is the common prefix of the layer's Hugging Face tensors."""

    def parameter_names(self) -> list[str]:
        """Return the names of its parameters in the spelling of megatron-core's torch-only layers."""

    def map_parameter(self, prefix: str, name: str) -> ParameterMap | None:
        """Return the map of parameter `name`; None if this part has no such parameter."""

    def sharding_units(self, prefix: str) -> list[ShardingUnit]:
        """Return the units that tensor- and expert-parallel ranks must divide evenly."""
