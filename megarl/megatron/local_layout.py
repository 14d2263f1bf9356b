"""This rank's weight layout in Hugging Face terms, and loading of its weights from a model folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.parameter_map import ParameterMap, local_shape, shard_pieces
from megarl.megatron.modeling.gpt_model import ModelChunk
from megarl.megatron.runtime import platform
from megarl.model_files.tensor_io import SafetensorsReader
from megarl.model_files.weight_index import merge_pairs, stored_shape
from megarl.reshard.layout.layout import ShardPiece, WeightLayout, extent, slices
from megarl.reshard.transfer.bucket import dtype_name, torch_dtype


def find_weights(model: ModelArchitecture, chunks: Sequence[ModelChunk]) -> dict[str, tuple[Tensor, ParameterMap]]:
    """Return this rank's parameters by megatron-core name, with global layer and expert numbers, and their maps."""
    weights: dict[str, tuple[Tensor, ParameterMap]] = {}
    for chunk in chunks:
        held: dict[str, Tensor] = dict(chunk.module.named_parameters())
        # the only buffer that is part of the model's weights
        held |= {name: buffer for name, buffer in chunk.module.named_buffers() if name.endswith("router.expert_bias")}
        for name, tensor in held.items():
            global_name = chunk.global_name(name)
            weights[global_name] = tensor, model.parameter_map(global_name)
    return weights


def view_weights(weights: Mapping[str, tuple[Tensor, ParameterMap]]) -> dict[str, Tensor]:
    """Return the current tensors of what `find_weights` returned, each as a `local_view`."""
    return {name: local_view(mapping, weight.data) for name, (weight, mapping) in weights.items()}


def local_view(mapping: ParameterMap, tensor: Tensor) -> Tensor:
    """Return a view of a parameter, or its gradient, in the order of dimensions of its Hugging Face tensor.

    It differs from the parameter where tensors have all experts, and is then a stack of one: [out, in] becomes
    [1, out, in]; transposed, [1, in, out], and gate above up [2 n, in] becomes [1, in, n, 2].
    """
    if not mapping.stack_size:
        return tensor
    if mapping.transposed:
        if len(mapping.parts[0][0].shape) == tensor.dim() + 1:
            tensor = tensor.view(2, -1, *tensor.shape[1:])
        tensor = tensor.permute(*reversed(range(tensor.dim())))
    return tensor[None]


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
            shape = layout.tensors[piece.tensor].shape
            stored = stored_shape(piece.tensor, shape)
            folder.require_shape(piece.tensor, stored)
            out = tensors[piece.local][slices(piece.local_box)]
            if stored == shape:
                folder.read(piece.tensor, piece.box, out, require_finite=True)
            else:
                box = merge_pairs(piece.box)
                pairs = torch.empty(extent(box), dtype=out.dtype, device=out.device)
                folder.read(piece.tensor, box, pairs, require_finite=True)
                out.copy_(pairs.view(out.shape))
