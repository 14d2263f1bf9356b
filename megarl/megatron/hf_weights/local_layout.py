"""This rank's weight layout in Hugging Face terms, and loading of its weights from a model folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.feed_forward import EXPERT_BIAS
from megarl.megatron.families.parameter_map import local_shape, shard_pieces
from megarl.megatron.modeling.gpt_model import ModelChunk
from megarl.megatron.runtime import platform
from megarl.model_files.reader import SafetensorsReader
from megarl.reshard.layout.layout import ShardPiece, WeightLayout, slices
from megarl.reshard.transfer.bucket import dtype_name, torch_dtype


def local_tensors(chunks: Sequence[ModelChunk]) -> dict[str, Tensor]:
    """Return this rank's tensors by megatron-core name, with global layer and expert numbers."""
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        held = {name: parameter.data for name, parameter in chunk.module.named_parameters()}
        # the only buffer that is part of the model's weights
        held |= {name: buffer for name, buffer in chunk.module.named_buffers() if name.endswith(EXPERT_BIAS)}
        tensors |= {chunk.global_name(name): tensor for name, tensor in held.items()}
    return tensors


def mtp_tensors(model: ModelArchitecture, groups: ProcessGroupCollection, dtype: torch.dtype) -> dict[str, Tensor]:
    """Allocate this rank's shards of the MTP layers, which are not trained but kept for export and checkpoints.

    The last pipeline stage holds them, sharded as in megatron-core.
    """
    if groups.pp.rank() != groups.pp.size() - 1:
        return {}
    tensors = {}
    for name, mapping in model.mtp_parameter_maps().items():
        if mapping.expert is not None and mapping.expert * groups.ep.size() // model.num_experts != groups.ep.rank():
            continue
        size = (groups.tp if mapping.expert is None else groups.expt_tp).size()
        stored_dtype = torch_dtype(mapping.dtype) if mapping.dtype else dtype
        tensors[name] = torch.empty(local_shape(mapping, size), dtype=stored_dtype, device=platform.device())
    return tensors


def make_layout(
    model: ModelArchitecture, tensors: Mapping[str, Tensor], groups: ProcessGroupCollection, dtype: torch.dtype
) -> WeightLayout:
    """Return the weight layout of this rank's `tensors`."""
    held: list[ShardPiece] = []
    for name, tensor in tensors.items():
        mapping = model.parameter_map(name)
        sharing = groups.tp if mapping.expert is None else groups.expt_tp
        held += shard_pieces(name, mapping, tuple(tensor.shape), rank=sharing.rank(), size=sharing.size())
    return WeightLayout(model.tensors(dtype_name(dtype)), tuple(held))


def read_weights(
    path: str, layout: WeightLayout, tensors: Mapping[str, Tensor], *, optional_tensors: Collection[str] = ()
) -> None:
    """Load `tensors` from the safetensors of folder `path`, reading only this rank's shards; padding becomes 0.

    Args:
        optional_tensors: Hugging Face tensors that become 0 if the folder lacks them.

    Raises:
        DataError: a tensor is missing, has another shape, or holds NaN or Inf.
    """
    for tensor in tensors.values():
        tensor.zero_()
    with SafetensorsReader(path) as folder:
        for piece in layout.pieces:
            if piece.tensor in optional_tensors and piece.tensor not in folder.tensors:
                continue
            folder.require_shape(piece.tensor, layout.tensors[piece.tensor].shape)
            out = tensors[piece.local][slices(piece.local_box)]
            folder.read(piece.tensor, piece.box, out, require_finite=True)
