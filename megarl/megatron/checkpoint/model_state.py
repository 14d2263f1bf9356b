"""Saves and loads model weights in megatron-core's checkpoint format (`torch_dist`), in any parallel layout.

Tensors have the names that Megatron-LM uses with Transformer Engine, which fuses a norm into the linear that follows
it. megatron-core's torch-only layers are saved under the same names, so either can load the checkpoint. Loading writes
into the existing parameters in place, tensor by tensor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from megarl.errors import DataError
from megarl.megatron.checkpoint.checkpoint_files import IndexedTensor, read_common_state, read_index
from megarl.megatron.families.architecture import HEAD, ModelArchitecture
from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.families.parameter_map import ParameterMap

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict

    from megarl.megatron.modeling.megatron_model import MegatronModel

CONTENT_METADATA = {"singleton_local_shards": False, "non_homogeneous_layers": True}
"""megatron-core's content metadata, which it stores in the checkpoint and reads before loading.

It determines tensor names: each layer has separate tensors, with the layer number in their names.
"""

CHECKPOINT_VERSION = 3.0
"""Megatron-LM's checkpoint version; it determines the row order of `linear_qkv`."""

MAX_SHOWN = 3
"""Maximum number of tensors that an error message names."""

_LAYER = re.compile(r"decoder\.layers\.(?:(?P<decoder>\d+)\.)?|mtp\.layers\.(?P<mtp>\d+)\.transformer_layer\.")
_EXPERT = re.compile(r"(?<=mlp\.experts\.)local_experts\.\d+\.")


def save_model(model: MegatronModel, folder: str | Path) -> None:
    """Write the weights into `folder`, which is created; collective over all ranks.

    Raises:
        DataError: a rank could not write; the message names the rank.
    """
    folder = Path(folder)
    state: ShardedStateDict = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    state |= sharded_state_dict(model, CONTENT_METADATA)
    try:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, str(folder), StreamingSave(), content_metadata=CONTENT_METADATA)
    except CheckpointException as e:
        raise DataError(f"{folder}: the checkpoint could not be written, {_first_failed_rank(e)}") from e
    except (OSError, RuntimeError) as e:
        raise DataError(f"{folder}: the checkpoint could not be written, on rank {dist.get_rank()}: {e}") from e


def load_model(model: MegatronModel, folder: str | Path, *, trust: bool = False) -> None:
    """Load the parameters from the checkpoint in `folder`; collective over all ranks.

    Padding rows of the vocabulary become 0.

    Args:
        trust: as in `read_index`.

    Raises:
        DataError: `folder` is not a complete checkpoint, or a checkpoint of another model.
    """
    folder = Path(folder)
    index = read_index(folder, trust=trust)
    content: Any = read_common_state(folder, trust=trust).get("content_metadata") or {}
    state = sharded_state_dict(model, content)
    apply_factories(state)  # splits fused parameters into their stored parts, which are views
    _drop_extra_state(state)
    _require_stored(folder, index, state, model.architecture)
    held = {_address(each.data) for each in nested_values(state)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
            loaded = dist_checkpointing.load(state, str(folder))
    except CheckpointException as e:
        raise DataError(f"{folder}: the checkpoint could not be read, {_first_failed_rank(e)}") from e
    except CheckpointingException as e:
        raise DataError(f"{folder}: the checkpoint could not be read, on rank {dist.get_rank()}: {e}") from e
    parameters = {key: value for key, value in loaded.items() if key.startswith("model")}
    assert {_address(tensor) for tensor in nested_values(parameters)} <= held, "megatron-core loaded into new tensors"


def sharded_state_dict(model: MegatronModel, content: Mapping[str, object]) -> dict[str, ShardedStateDict]:
    """Return megatron-core's sharded state dict of this rank's parameters, with Megatron-LM's keys.

    Args:
        content: content metadata, which determines tensor names (`CONTENT_METADATA`).
    """
    model.activate()
    metadata = {**content, "dp_cp_group": model.groups.dp_cp}
    chunks = [chunk.module.sharded_state_dict(metadata=metadata) for chunk in model.chunks]
    for sharded in nested_values(chunks):
        sharded.key = checkpoint_name(model.architecture, sharded.key)
        if model.architecture.head == "value" and sharded.key == HEAD:
            sharded.allow_shape_mismatch = False  # else megatron-core loads the first row of a language model's head
    maps = model.architecture.mtp_parameter_maps()
    chunks[-1] |= {
        name: list(shard_tensor(model, name, maps[name], tensor))
        for name, tensor in model.tensors().items()
        if name in maps
    }
    if len(chunks) == 1:
        return {"model": chunks[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(chunks)}


def shard_tensor(model: MegatronModel, name: str, mapping: ParameterMap, tensor: Tensor) -> Iterator[ShardedTensor]:
    """Yield the `ShardedTensor`s of a parameter that belongs to no module (MTP layers), as a module would.

    Args:
        name: megatron-core's name with global layer and expert numbers.
        mapping: how the parameter is sharded.
        tensor: this rank's shard.
    """
    groups, is_expert = model.groups, mapping.expert is not None
    tp, replicas = (groups.expt_tp, groups.expt_dp) if is_expert else (groups.tp, groups.dp_cp)
    if mapping.stack_size:
        mapping, tensor = mapping.of_expert, tensor[0]
    experts = [(0, mapping.expert, model.architecture.num_experts)] if is_expert else []
    parts = tensor.chunk(len(mapping.parts))
    for number, part in enumerate(parts):
        offsets = list(experts)
        if mapping.shard_dim is not None:
            fragment = number * tp.size() + tp.rank()
            offsets.append((len(experts) + mapping.shard_dim, fragment, len(parts) * tp.size()))
        yield ShardedTensor.from_rank_offsets(
            checkpoint_name(model.architecture, _EXPERT.sub("experts.", name)),
            part,
            *offsets,
            replica_id=(0, tp.rank() if mapping.shard_dim is None else 0, replicas.rank()),
            prepend_axis_num=len(experts),
        )


def checkpoint_name(architecture: ModelArchitecture, name: str) -> str:
    """Return the tensor's name with Transformer Engine for megatron-core's name `name`."""
    layer = _LAYER.match(name)
    if not layer:
        return name
    number = architecture.num_layers + int(layer["mtp"]) if layer["mtp"] else int(layer["decoder"] or 0)
    in_model = architecture.layer(number)
    attention = in_model.attention
    is_latent = isinstance(attention, LatentAttention)
    # an indexer reads the normalized query latent
    has_fused_norms = isinstance(attention, LatentAttention) and attention.indexer is None
    in_layer = name[layer.end() :]
    match in_layer:
        case "input_layernorm.weight" if not is_latent:
            in_layer = "self_attention.linear_qkv.layer_norm_weight"
        case "self_attention.q_layernorm.weight" if has_fused_norms:
            in_layer = "self_attention.linear_q_up_proj.layer_norm_weight"
        case "self_attention.kv_layernorm.weight" if has_fused_norms:
            in_layer = "self_attention.linear_kv_up_proj.layer_norm_weight"
        case "pre_mlp_layernorm.weight" if not in_model.has_routed_experts:
            in_layer = "mlp.linear_fc1.layer_norm_weight"
    return layer[0] + in_layer


class StreamingSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy that writes megatron-core's format with torch's writer, without helper processes.

    What is not a tensor goes to common.pt, where megatron-core before 0.19 looks for it too.

    On a CPU it also avoids copies. Both writers copy a tensor whose storage holds more than the tensor, such as a part
    of a fused parameter, and keep the copies to the end, which would take half of the model's size.
    """

    @override
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        common = sharded_state_dict.pop("common_state")
        if dist.get_rank() == 0:
            torch.save(common.data, Path(checkpoint_dir) / "common.pt")
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        for sharded in nested_values(by_key):
            if isinstance(sharded, ShardedTensor):
                sharded.data = with_own_storage(sharded.data)
        save_distributed(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _require_stored(
    folder: Path, index: Mapping[str, IndexedTensor], state: ShardedStateDict, architecture: ModelArchitecture
) -> None:
    """Raise DataError on all ranks if the checkpoint lacks a tensor that any rank needs."""
    problems = []
    for sharded in nested_values(state):
        stored = index.get(sharded.key)
        needed = tuple(sharded.global_shape)
        if stored is None:
            problems.append(f"{sharded.key} is missing")
        elif sharded.allow_shape_mismatch:
            # the padding depends on the layout
            if stored.shape[1:] != needed[1:] or stored.shape[0] < architecture.vocab_size:
                problems.append(
                    f"{sharded.key} needs at least {architecture.vocab_size} rows of {list(needed[1:])}, got "
                    f"{list(stored.shape)}"
                )
        elif stored.shape != needed:
            problems.append(f"{sharded.key} needs shape {list(needed)}, got {list(stored.shape)}")
    by_rank: list[list[str]] = [problems] * dist.get_world_size()
    dist.all_gather_object(by_rank, problems)
    every = sorted({problem for each in by_rank for problem in each})
    if every:
        more = f" and {len(every) - MAX_SHOWN} more" if len(every) > MAX_SHOWN else ""
        raise DataError(
            f"{folder} is not a checkpoint of {architecture.name} as its config.json describes it: "
            f"{'; '.join(every[:MAX_SHOWN])}{more}"
        )


def _drop_extra_state(state: dict[str, ShardedStateDict]) -> None:
    """Remove Transformer Engine's FP8 extra state, which is not a tensor."""
    for chunk in state.values():
        for key in [key for key in chunk if key.endswith("_extra_state")]:
            del chunk[key]


def with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory whose storage holds nothing else, if that needs no copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor
    same_bytes = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return same_bytes.view(tensor.dtype).view(tensor.shape)


def _address(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _first_failed_rank(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"on rank {rank}: {cause}"
