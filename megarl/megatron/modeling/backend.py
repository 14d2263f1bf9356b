"""Decides between Transformer Engine and plain torch: which layers a model is built from and which kernels are fused.

Layers, fused kernels and the description of packs follow from this decision and from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from megarl.config.megatron import MegatronConfig
from megarl.megatron.mcore_fields import fusion_fields, needs_torch_layers
from megarl.megatron.runtime import platform

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.megatron.families.architecture import ModelArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBackend:
    """What a model is computed with."""

    has_te: bool
    """Transformer Engine's kernels can be called: CUDA and the package are there."""

    te_layers: bool
    """The layers are Transformer Engine's; False: those of `torch_layers` and megatron-core's local ones."""

    def block_spec(
        self, architecture: ModelArchitecture, config: TransformerConfig, layers: range, vp_stage: int | None
    ) -> TransformerBlockSubmodules:
        """Return the block spec of a model chunk with these (global) layer numbers."""
        from megarl.megatron.modeling.layer_spec import te_block_spec, torch_block_spec

        return te_block_spec(config, vp_stage) if self.te_layers else torch_block_spec(architecture, layers)

    def fusions(self, architecture: ModelArchitecture) -> dict[str, bool]:
        """Return megatron-core's fields of fused kernels."""
        has_kernel = find_spec("fused_weight_gradient_mlp_cuda") is not None
        return fusion_fields(architecture, has_te=self.has_te, te_layers=self.te_layers, has_wgrad_kernel=has_kernel)


def layer_backend(architecture: ModelArchitecture, megatron: MegatronConfig, dtype: torch.dtype) -> LayerBackend:
    """Return the backend of a model on this machine, with parameters of `dtype`."""
    has_te, name = platform.uses_transformer_engine(), str(dtype).removeprefix("torch.")
    return LayerBackend(has_te=has_te, te_layers=has_te and not needs_torch_layers(architecture, megatron, name))
