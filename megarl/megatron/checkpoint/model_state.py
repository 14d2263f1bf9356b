"""The model in megatron-core's checkpoint format (`torch_dist`): saved in one layout, loaded in any.

Tensors are named as Megatron-LM names them with Transformer Engine, which fuses a norm into the linear behind it;
megatron-core's torch-only layers save theirs under the same names, so a checkpoint serves both. What is loaded is
written into the parameters where they lie, tensor by tensor.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from megarl.errors import DataError
from megarl.megatron.checkpoint.checkpoint_files import IndexedTensor, read_index
from megarl.megatron.families.architecture import HEAD, Decoder
from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.families.parameter_map import ParameterMap

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import ModelRank

CONTENT = {"singleton_local_shards": False, "non_homogeneous_layers": True}
"""How tensors are named, kept in the checkpoint, where Megatron-LM looks it up before loading: every layer has tensors
of its own, with its number in their names."""

CHECKPOINT_VERSION = 3.0
"""Of the order of rows in `linear_qkv`, as Megatron-LM counts."""

SHOWN = 3
"""Tensors that an error names."""

_LAYER = re.compile(r"decoder\.layers\.(?:(?P<decoder>\d+)\.)?|mtp\.layers\.(?P<mtp>\d+)\.transformer_layer\.")
_EXPERT = re.compile(r"(?<=mlp\.experts\.)local_experts\.\d+\.")


def save_model(rank: ModelRank, folder: str | Path) -> None:
    """Write the weights into `folder`, which is made; all ranks together.

    Raises:
        DataError: a rank could not write; names it.
    """
    folder = Path(folder)
    state: dict[str, Any] = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    state |= sharded_model(rank, CONTENT)
    try:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, str(folder), _StreamingSave("torch_dist", 1), content_metadata=CONTENT)
    except CheckpointException as e:
        raise DataError(f"{folder}: the checkpoint could not be written, {_first_failure(e)}") from e
    except (OSError, RuntimeError) as e:
        raise DataError(f"{folder}: the checkpoint could not be written, on rank {dist.get_rank()}: {e}") from e


def load_model(rank: ModelRank, folder: str | Path) -> None:
    """Fill the parameters from the checkpoint in `folder`; all ranks together. Rows that pad the vocabulary become 0.

    Raises:
        DataError: `folder` is no whole checkpoint, or one of another model.
    """
    folder = Path(folder)
    index = read_index(folder)
    state = sharded_model(rank, _read_content(folder))
    apply_factories(state)  # a fused parameter becomes the parts that it is stored in, each a view of it
    _drop_objects(state)
    _require_stored(folder, index, state, rank.model)
    held = {_address(each.data) for each in nested_values(state)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
            loaded = dist_checkpointing.load(state, str(folder))
    except CheckpointException as e:
        raise DataError(f"{folder}: the checkpoint could not be read, {_first_failure(e)}") from e
    except CheckpointingException as e:
        raise DataError(f"{folder}: the checkpoint could not be read, on rank {dist.get_rank()}: {e}") from e
    ours = {key: value for key, value in loaded.items() if key.startswith("model")}
    assert {_address(tensor) for tensor in nested_values(ours)} <= held, "megatron-core loads into new tensors"


def sharded_model(rank: ModelRank, content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """This rank's parameters as megatron-core describes them to a checkpoint, under Megatron-LM's keys.

    Args:
        content: how tensors are named; see `CONTENT`.
    """
    rank.activate()
    metadata = {**content, "dp_cp_group": rank.groups.dp_cp}
    chunks = [chunk.module.sharded_state_dict(metadata=metadata) for chunk in rank.chunks]
    for sharded in nested_values(chunks):
        sharded.key = stored_name(rank.model, sharded.key)
        if rank.model.head == "value" and sharded.key == HEAD:
            sharded.allow_shape_mismatch = False  # megatron-core would take the first row of a language model's head
    maps = rank.model.mtp_maps()
    chunks[-1] |= {
        name: list(shard_tensor(rank, name, maps[name], tensor))
        for name, tensor in rank.tensors().items()
        if name in maps
    }
    if len(chunks) == 1:
        return {"model": chunks[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(chunks)}


def shard_tensor(rank: ModelRank, name: str, mapping: ParameterMap, tensor: Tensor) -> Iterator[ShardedTensor]:
    """What `sharded_model` has of a parameter that belongs to a module, for one that does not.

    Args:
        name: layers and experts numbered globally.
        tensor: what this rank holds of it.
    """
    groups, is_expert = rank.groups, mapping.expert is not None
    tp, copies = (groups.expt_tp, groups.expt_dp) if is_expert else (groups.tp, groups.dp_cp)
    experts = [(0, mapping.expert, rank.model.num_experts)] if is_expert else []
    parts = tensor.chunk(len(mapping.parts))
    for number, part in enumerate(parts):
        offsets = list(experts)
        if mapping.shard_dim is not None:
            fragment = number * tp.size() + tp.rank()
            offsets.append((len(experts) + mapping.shard_dim, fragment, len(parts) * tp.size()))
        yield ShardedTensor.from_rank_offsets(
            stored_name(rank.model, _EXPERT.sub("experts.", name)),
            part,
            *offsets,
            replica_id=(0, tp.rank() if mapping.shard_dim is None else 0, copies.rank()),
            prepend_axis_num=len(experts),
        )


def stored_name(model: Decoder, name: str) -> str:
    """megatron-core's name of a tensor, as it is with Transformer Engine."""
    layer = _LAYER.match(name)
    if not layer:
        return name
    number = model.num_layers + int(layer["mtp"]) if layer["mtp"] else int(layer["decoder"] or 0)
    is_latent = isinstance(model.attention, LatentAttention)
    in_layer = name[layer.end() :]
    match in_layer:
        case "input_layernorm.weight" if not is_latent:
            in_layer = "self_attention.linear_qkv.layer_norm_weight"
        case "self_attention.q_layernorm.weight" if is_latent:
            in_layer = "self_attention.linear_q_up_proj.layer_norm_weight"
        case "self_attention.kv_layernorm.weight" if is_latent:
            in_layer = "self_attention.linear_kv_up_proj.layer_norm_weight"
        case "pre_mlp_layernorm.weight" if not model.is_routed(number):
            in_layer = "mlp.linear_fc1.layer_norm_weight"
    return layer[0] + in_layer


class _StreamingSave(SaveShardedStrategy):  # type: ignore[misc]
    """megatron-core's format by torch's own writer, without other processes and, on a CPU, without copies.

    Both writers copy a tensor whose storage holds more, as that of a fused parameter's part does, and keep the copies
    to the end: they would be half of a model.
    """

    @property
    def can_handle_sharded_objects(self) -> bool:
        """See `SaveStrategyBase`."""
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """See `SaveShardedStrategy`."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        for sharded in nested_values(by_key):
            if isinstance(sharded, ShardedTensor):
                sharded.data = in_own_storage(sharded.data)
        save_distributed(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _read_content(folder: Path) -> Mapping[str, Any]:
    """How the tensors in `folder` are named."""
    try:
        return dist_checkpointing.load_content_metadata(str(folder)) or {}
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as e:
        raise DataError(f"{folder / 'common.pt'} cannot be read: {e}") from e


def _require_stored(folder: Path, index: Mapping[str, IndexedTensor], state: Any, model: Decoder) -> None:
    """Return if the checkpoint holds what all ranks need, else raise DataError on all of them."""
    problems = []
    for sharded in nested_values(state):
        stored = index.get(sharded.key)
        needed = tuple(sharded.global_shape)
        if stored is None:
            problems.append(f"{sharded.key} is missing")
        elif sharded.allow_shape_mismatch:
            # rows are padded according to the layout
            if stored.shape[1:] != needed[1:] or stored.shape[0] < model.vocab_size:
                problems.append(
                    f"{sharded.key} needs at least {model.vocab_size} rows of {list(needed[1:])}, got "
                    f"{list(stored.shape)}"
                )
        elif stored.shape != needed:
            problems.append(f"{sharded.key} needs shape {list(needed)}, got {list(stored.shape)}")
    by_rank: list[list[str]] = [problems] * dist.get_world_size()
    dist.all_gather_object(by_rank, problems)
    every = sorted({problem for each in by_rank for problem in each})
    if every:
        more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
        raise DataError(
            f"{folder} is no checkpoint of {model.architecture} as its config.json describes it: "
            f"{'; '.join(every[:SHOWN])}{more}"
        )


def _drop_objects(state: dict[str, dict[str, Any]]) -> None:
    """Leave out what is no tensor: Transformer Engine's calibration of 8-bit arithmetic."""
    for chunk in state.values():
        for key in [key for key in chunk if key.endswith("_extra_state")]:
            del chunk[key]


def in_own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage holds nothing else, where that needs no copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor
    same_bytes = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return same_bytes.view(tensor.dtype).view(tensor.shape)


def _address(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"on rank {rank}: {cause}"
