"""What a decoder layer is made of, each part with its megatron-core and Hugging Face names.

Names on megatron-core's side are those within a layer (`self_attention.linear_qkv.weight`), experts numbered globally.
Transformer Engine fuses a norm into the linear that follows it, under the linear's name (`...layer_norm_weight`), and
its grouped linear numbers experts at the end (`mlp.experts.linear_fc1.weight7`); both spellings are understood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from megarl.megatron.families.parameter_map import ParameterMap


@dataclass(frozen=True, slots=True)
class Units:
    """What ranks can only divide among themselves whole."""

    what: str
    """As `model.layers.0.self_attn.q_proj.weight has query heads`."""
    total: int
    axis: Literal["tp", "etp", "ep"]
    repeats: bool = False
    """Where an engine has more ranks than there are, several ranks hold the same."""


class LayerPart(Protocol):
    """A part of a layer; `prefix` is that of the layer's Hugging Face tensors."""

    def names(self) -> list[str]:
        """Of its parameters, in megatron-core's first spelling."""

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """How its parameter `name` is made; None where the part has none of that name."""

    def units(self, prefix: str) -> list[Units]:
        """What tensor- and expert-parallel ranks must divide."""
