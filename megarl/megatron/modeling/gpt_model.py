"""Builds megatron-core's model chunks from a model architecture (a parsed Hugging Face config.json)."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.parameter_map import global_name
from megarl.megatron.families.trainer_layouts import PipelineSplit, padded_vocab, stage_layers
from megarl.megatron.modeling.language_head import HeadOptions, LanguageHead
from megarl.megatron.modeling.layer_spec import LayerBackend
from megarl.megatron.modeling.rotary import inverse_frequencies
from megarl.megatron.modeling.torch_layers import ValueHead
from megarl.megatron.runtime import platform
from megarl.reshard.transfer.bucket import torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChunk:
    """A contiguous range of decoder layers on this rank; a rank has several with the interleaved pipeline schedule."""

    module: LanguageModule
    layers: range
    """Global numbers of its decoder layers."""
    first_expert: int
    """Global number of this rank's first routed expert in each layer."""

    def global_name(self, name: str) -> str:
        """Return megatron-core's parameter `name` with global layer and expert numbers."""
        return global_name(name, self.layers, self.first_expert)


def build_chunks(
    architecture: ModelArchitecture,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    split: PipelineSplit,
    *,
    backend: LayerBackend,
    head: HeadOptions,
) -> list[ModelChunk]:
    """Build this rank's chunks with uninitialized weights; `head` applies to language models."""
    pp, pp_rank = groups.pp.size(), groups.pp.rank()
    first_expert = groups.ep.rank() * architecture.num_experts // groups.ep.size()
    chunks = []
    for number, layers in enumerate(stage_layers(architecture.num_layers, pp, split)[pp_rank]):
        first, last = pp_rank == 0 and number == 0, pp_rank == pp - 1 and number == split.num_chunks - 1
        vp_stage = number if split.num_chunks > 1 else None
        spec = backend.block_spec(architecture, config, layers, vp_stage)
        module = _make_module(architecture, config, groups, spec, ends=(first, last), vp_stage=vp_stage)
        _apply_architecture(module, architecture, groups, head)
        chunk = ModelChunk(module=module.to(platform.device()), layers=layers, first_expert=first_expert)
        _set_dtypes(chunk, architecture)
        mark_experts(chunk, architecture, groups)
        check_shard_marks(chunk, architecture, groups)
        chunks.append(chunk)
    return chunks


def _make_module(
    architecture: ModelArchitecture,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    spec: TransformerBlockSubmodules,
    *,
    ends: tuple[bool, bool],
    vp_stage: int | None,
) -> LanguageModule:
    """Return megatron-core's model of a chunk; the only place that chooses its class.

    `GPTModel` gets only bug fixes since megatron-core 0.19; new kinds of layers need its `HybridModel`.

    Args:
        ends: whether the chunk has the embedding, and whether it has the output layer.
    """
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(architecture, groups.tp.size()),
        max_sequence_length=architecture.max_positions,
        position_embedding_type="rope",
        rotary_base=10_000,  # of frequencies that are replaced
        pre_process=ends[0],
        post_process=ends[1],
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def _apply_architecture(
    module: LanguageModule, architecture: ModelArchitecture, groups: ProcessGroupCollection, head: HeadOptions
) -> None:
    """Apply features of the architecture that megatron-core has no option for."""
    rotated = architecture.attentions(GroupedQueryAttention)
    if rotated:
        module.rotary_pos_emb.inv_freq = inverse_frequencies(rotated[0].rope, rotated[0].head_dim)
    for layer in module.decoder.layers:  # megatron-core numbers layers globally, from 1
        attention = architecture.layers[layer.layer_number - 1].attention
        layer.rotary = None
        if isinstance(attention, GroupedQueryAttention) and attention.rope != rotated[0].rope:
            layer.rotary = copy(module.rotary_pos_emb)
            layer.rotary.inv_freq = inverse_frequencies(attention.rope, attention.head_dim)
    if module.pre_process and architecture.embedding_scale != 1.0:
        _scale_embedding(module, architecture.embedding_scale)
    if module.post_process and architecture.head == "value":
        module.output_layer = ValueHead(module.config, groups.tp)
    elif module.post_process:
        module.output_layer = LanguageHead(
            module.output_layer, head, vocab_size=architecture.vocab_size, softcap=architecture.logit_softcap
        )


def _set_dtypes(chunk: ModelChunk, architecture: ModelArchitecture) -> None:
    """Give parameters whose map states a dtype that dtype; megatron-core creates all in the model's."""
    for name, parameter in chunk.module.named_parameters():
        dtype = architecture.parameter_map(chunk.global_name(name)).dtype
        if dtype is not None:
            parameter.data = parameter.data.to(torch_dtype(dtype))


def mark_experts(chunk: ModelChunk, architecture: ModelArchitecture, groups: ProcessGroupCollection) -> None:
    """Mark routed experts: reduced over expert-data-parallel ranks, and counted in the gradient norm on every rank.

    A bias that the expert tensor ranks have copies of is counted on the first of them.

    megatron-core marks them for the reduction only if ep > 1; with tp > 1 and ep = 1 their gradients would stay
    unreduced. It leaves the mark for the norm to the linear layer, of which some versions lack it.
    """
    for name, parameter in chunk.module.named_parameters():
        mapping = architecture.parameter_map(chunk.global_name(name))
        if mapping.expert is not None:
            parameter.allreduce = False
            parameter.tensor_model_parallel = mapping.shard_dim is not None or groups.expt_tp.rank() == 0


def check_shard_marks(chunk: ModelChunk, architecture: ModelArchitecture, groups: ProcessGroupCollection) -> None:
    """Assert that the gradient norm counts every parameter once: shards on all ranks, copies on the first rank.

    Frozen parameters have no gradient.
    """
    for name, parameter in chunk.module.named_parameters():
        mapping = architecture.parameter_map(chunk.global_name(name))
        is_split, is_marked = mapping.shard_dim is not None, getattr(parameter, "tensor_model_parallel", False)
        is_expert, sharing = mapping.expert is not None, groups.tp if mapping.expert is None else groups.expt_tp
        is_counted = is_split or (is_expert and sharing.rank() == 0)
        assert parameter.requires_grad != mapping.frozen, f"{name}: frozen {mapping.frozen}"
        assert not is_expert or not parameter.allreduce, f"expert weight {name} is not marked"
        assert sharing.size() == 1 or is_counted == is_marked, f"{name}: counted {is_counted}, marked {is_marked}"


def _scale_embedding(module: LanguageModule, scale: float) -> None:
    def hook(_: torch.nn.Module, __: object, embedded: Tensor) -> Tensor:
        # rounded to the compute precision first, as Hugging Face does
        return embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)

    module.embedding.register_forward_hook(hook)
