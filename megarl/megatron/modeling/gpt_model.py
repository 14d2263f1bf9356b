"""Builds megatron-core GPTModel chunks from a model architecture (a parsed Hugging Face config.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.parameter_names import global_name
from megarl.megatron.families.pipeline_stages import PipelineSplit, stage_layers
from megarl.megatron.families.trainer_layouts import padded_vocab
from megarl.megatron.modeling.layer_spec import torch_block_spec
from megarl.megatron.modeling.rotary_embedding import inverse_frequencies
from megarl.megatron.modeling.torch_layers import ValueHead
from megarl.megatron.runtime import platform

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

PADDED_LOGIT = -1e9
"""Logit of vocabulary padding, masked out of the softmax (three unmasked columns cost 5e-3 in log-probability)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChunk:
    """A contiguous range of decoder layers on this rank; a rank has several with the interleaved pipeline schedule."""

    module: GPTModel
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
    temperature: float,
) -> list[ModelChunk]:
    """Build this rank's chunks with uninitialized weights. Logits are divided by `temperature`; values are not."""
    pp, pp_rank = groups.pp.size(), groups.pp.rank()
    first_expert = groups.ep.rank() * architecture.num_experts // groups.ep.size()
    chunks = []
    for number, layers in enumerate(stage_layers(architecture.num_layers, pp, split)[pp_rank]):
        first, last = pp_rank == 0 and number == 0, pp_rank == pp - 1 and number == split.num_chunks - 1
        vp_stage = number if split.num_chunks > 1 else None
        module = GPTModel(
            config=config,
            transformer_layer_spec=_layer_block_spec(architecture, config, layers, vp_stage),
            vocab_size=padded_vocab(architecture, groups.tp.size()),
            max_sequence_length=architecture.max_positions,
            position_embedding_type="rope",
            rotary_base=architecture.rope.theta,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tie_embeddings,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        _apply_architecture(module, architecture, groups, temperature)
        chunk = ModelChunk(module=module.to(platform.device()), layers=layers, first_expert=first_expert)
        _mark_experts(chunk, architecture)
        chunks.append(chunk)
    return chunks


def _layer_block_spec(
    architecture: ModelArchitecture, config: TransformerConfig, layers: range, vp_stage: int | None
) -> TransformerBlockSubmodules:
    # Transformer Engine has no attention softcap and no norm after its row-parallel linears.
    needs_torch = architecture.mlp.post_norm or bool(architecture.window_sizes)
    if platform.uses_transformer_engine() and not needs_torch:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return torch_block_spec(architecture, layers)


def _apply_architecture(
    module: GPTModel, architecture: ModelArchitecture, groups: ProcessGroupCollection, temperature: float
) -> None:
    """Apply features of the architecture that megatron-core has no option for."""
    if isinstance(architecture.attention, GroupedQueryAttention):
        module.rotary_pos_emb.inv_freq = inverse_frequencies(architecture.rope, architecture.attention.head_dim)
    if module.pre_process and architecture.embedding_scale != 1.0:
        _scale_embedding(module, architecture.embedding_scale)
    if module.post_process and architecture.head == "value":
        module.output_layer = ValueHead(module.config, groups.tp)
    elif module.post_process:
        _transform_logits(module, architecture, groups.tp.rank(), temperature)


def _mark_experts(chunk: ModelChunk, architecture: ModelArchitecture) -> None:
    # megatron-core marks experts only if ep > 1; with tp > 1 and ep = 1 their gradients would stay unreduced.
    for name, parameter in chunk.module.named_parameters():
        if architecture.parameter_map(chunk.global_name(name)).expert is not None:
            parameter.allreduce = False


def _scale_embedding(module: GPTModel, scale: float) -> None:
    def hook(_: torch.nn.Module, __: object, embedded: Tensor) -> Tensor:
        # rounded to the compute precision first, as Hugging Face does
        return embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)

    module.embedding.register_forward_hook(hook)


def _transform_logits(module: GPTModel, architecture: ModelArchitecture, tp_rank: int, temperature: float) -> None:
    cap = architecture.logit_softcap

    def hook(_: torch.nn.Module, __: object, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        logits, bias = output
        logits = logits.float()  # before softcap and temperature, as in inference engines
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if temperature != 1.0:
            logits = logits / temperature
        first = tp_rank * logits.shape[-1]
        if first + logits.shape[-1] > architecture.vocab_size:
            column = torch.arange(first, first + logits.shape[-1], device=logits.device)
            logits = logits.masked_fill(column >= architecture.vocab_size, PADDED_LOGIT)
        return logits, bias

    module.output_layer.register_forward_hook(hook)
