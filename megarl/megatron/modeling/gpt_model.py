"""megatron-core's GPTModel, built from a Hugging Face config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.parameter_names import global_name
from megarl.megatron.families.pipeline_stages import PipelineSplit, stage_layers
from megarl.megatron.families.trainer_layouts import padded_vocab
from megarl.megatron.modeling.layer_spec import torch_block
from megarl.megatron.modeling.rotary_embedding import inverse_frequencies
from megarl.megatron.modeling.torch_layers import ValueHead
from megarl.megatron.runtime import platform

PADDED_LOGIT = -1e9
"""Logit of vocabulary padding: must not enter the softmax (three unmasked columns cost 5e-3 in log-probability)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChunk:
    """What a rank holds of the decoder in one piece; several with the interleaved pipeline schedule."""

    module: GPTModel
    layers: range
    """Numbers of its decoder layers."""
    first_expert: int
    """Number of the first routed expert of each of them."""

    def global_name(self, name: str) -> str:
        """megatron-core's `name` with layers and experts numbered over all ranks."""
        return global_name(name, self.layers, self.first_expert)


def build_chunks(
    model: Decoder,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    split: PipelineSplit,
    *,
    temperature: float,
) -> list[ModelChunk]:
    """This rank's chunks, weights not yet set. Logits are divided by `temperature`, values are not."""
    pp, pp_rank = groups.pp.size(), groups.pp.rank()
    first_expert = groups.ep.rank() * model.num_experts // groups.ep.size()
    chunks = []
    for number, layers in enumerate(stage_layers(model.num_layers, pp, split)[pp_rank]):
        first, last = pp_rank == 0 and number == 0, pp_rank == pp - 1 and number == split.chunks - 1
        vp_stage = number if split.chunks > 1 else None
        module = GPTModel(
            config=config,
            transformer_layer_spec=_block(model, config, layers, vp_stage),
            vocab_size=padded_vocab(model, groups.tp.size()),
            max_sequence_length=model.max_positions,
            position_embedding_type="rope",
            rotary_base=model.rope.theta,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tie_embeddings,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        _complete(module, model, groups, temperature)
        chunk = ModelChunk(module=module.to(platform.device()), layers=layers, first_expert=first_expert)
        _mark_experts(chunk, model)
        chunks.append(chunk)
    return chunks


def _block(model: Decoder, config: TransformerConfig, layers: range, vp_stage: int | None) -> Any:
    # Transformer Engine has neither capped scores nor norms behind its row-parallel linears.
    needs_torch = model.mlp.sandwiched or bool(model.windows)
    if platform.uses_transformer_engine() and not needs_torch:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return torch_block(model, layers)


def _complete(module: GPTModel, model: Decoder, groups: ProcessGroupCollection, temperature: float) -> None:
    """What megatron-core has no option for."""
    if isinstance(model.attention, GroupedQueryAttention):
        module.rotary_pos_emb.inv_freq = inverse_frequencies(model.rope, model.attention.head_dim)
    if module.pre_process and model.embedding_scale != 1.0:
        _scale_embedding(module, model.embedding_scale)
    if module.post_process and model.head == "value":
        module.output_layer = ValueHead(module.config, groups.tp)
    elif module.post_process:
        _finish_logits(module, model, groups.tp.rank(), temperature)


def _mark_experts(chunk: ModelChunk, model: Decoder) -> None:
    # megatron-core does so only where ep > 1, and with tp > 1 leaves gradients of experts unreduced elsewhere.
    for name, parameter in chunk.module.named_parameters():
        if model.parameter_map(chunk.global_name(name)).expert is not None:
            parameter.allreduce = False


def _scale_embedding(module: GPTModel, scale: float) -> None:
    def hook(_: torch.nn.Module, __: Any, embedded: Tensor) -> Tensor:
        # rounded to the compute precision first, as Hugging Face does
        return embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)

    module.embedding.register_forward_hook(hook)


def _finish_logits(module: GPTModel, model: Decoder, tp_rank: int, temperature: float) -> None:
    cap = model.logit_softcap

    def hook(_: torch.nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        logits = logits.float()  # as engines do, before anything is made of them
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if temperature != 1.0:
            logits = logits / temperature
        first = tp_rank * logits.shape[-1]
        if first + logits.shape[-1] > model.vocab_size:
            column = torch.arange(first, first + logits.shape[-1], device=logits.device)
            logits = logits.masked_fill(column >= model.vocab_size, PADDED_LOGIT)
        return logits, bias

    module.output_layer.register_forward_hook(hook)
