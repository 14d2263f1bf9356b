"""Where this rank's weights lie in Hugging Face terms, and reading them from a model folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.parameter_map import local_shape, pieces
from megarl.megatron.modeling.gpt_model import ModelChunk
from megarl.megatron.runtime import platform
from megarl.model_files.reader import TensorFolder
from megarl.reshard.layout.layout import Piece, WeightLayout, slices
from megarl.reshard.transfer.bucket import dtype_name, torch_dtype


def local_tensors(chunks: Sequence[ModelChunk]) -> dict[str, Tensor]:
    """What this rank's chunks hold of the model by megatron-core's name, layers and experts numbered globally."""
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        held = {name: parameter.data for name, parameter in chunk.module.named_parameters()}
        # the one buffer that is part of the model
        held |= {name: buffer for name, buffer in chunk.module.named_buffers() if name.endswith("router.expert_bias")}
        tensors |= {chunk.global_name(name): tensor for name, tensor in held.items()}
    return tensors


def carried_tensors(model: Decoder, groups: ProcessGroupCollection, dtype: torch.dtype) -> dict[str, Tensor]:
    """Room for this rank's share of what is not trained but handed on: the layers that predict further tokens.

    The last pipeline stage holds them, sharded as megatron-core would.
    """
    if groups.pp.rank() != groups.pp.size() - 1:
        return {}
    tensors = {}
    for name, mapping in model.mtp_maps().items():
        if mapping.expert is not None and mapping.expert * groups.ep.size() // model.num_experts != groups.ep.rank():
            continue
        size = (groups.tp if mapping.expert is None else groups.expt_tp).size()
        kept = torch_dtype(mapping.dtype) if mapping.dtype else dtype
        tensors[name] = torch.empty(local_shape(mapping, size), dtype=kept, device=platform.device())
    return tensors


def layout(
    model: Decoder, tensors: Mapping[str, Tensor], groups: ProcessGroupCollection, dtype: torch.dtype
) -> WeightLayout:
    """The boxes that this rank's `tensors` hold."""
    held: list[Piece] = []
    for name, tensor in tensors.items():
        mapping = model.parameter_map(name)
        sharing = groups.tp if mapping.expert is None else groups.expt_tp
        held += pieces(name, mapping, tuple(tensor.shape), rank=sharing.rank(), size=sharing.size())
    return WeightLayout(model.tensors(dtype_name(dtype)), tuple(held))


def read_weights(
    path: str, layout: WeightLayout, tensors: Mapping[str, Tensor], *, absent: Collection[str] = ()
) -> None:
    """Fill `tensors` from the safetensors of folder `path`, reading only what this rank holds; padding becomes 0.

    Args:
        absent: tensors that become 0 where the folder does not have them.

    Raises:
        DataError: a tensor is missing, has another shape, or holds NaN or Inf.
    """
    for tensor in tensors.values():
        tensor.zero_()
    with TensorFolder(path) as folder:
        for piece in layout.pieces:
            if piece.tensor in absent and piece.tensor not in folder.tensors:
                continue
            folder.require_shape(piece.tensor, layout.tensors[piece.tensor].shape)
            out = tensors[piece.local][slices(piece.local_box)]
            folder.read(piece.tensor, piece.box, out, require_finite=True)
