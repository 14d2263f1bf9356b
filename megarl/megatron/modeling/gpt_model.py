"""Builds megatron-core's model chunks from a model architecture (a parsed Hugging Face config.json).

The output layer of a language model is `LanguageHead`: it computes log-probabilities and entropies of the tokens that a
loss reads.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import override

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.losses import TokenScores
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.parameter_map import global_name
from megarl.megatron.families.trainer_layouts import PipelineSplit, padded_vocab, stage_layers
from megarl.megatron.modeling.layer_spec import LayerBackend
from megarl.megatron.modeling.rotary import inverse_frequencies
from megarl.megatron.modeling.torch_layers import ValueHead, float32_weight
from megarl.megatron.runtime import platform
from megarl.reshard.transfer.bucket import torch_dtype
from megarl_kernels import linear_logprob_entropy, logprob_entropy_


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """How a language head computes scores."""

    temperature: float
    """Logits are divided by it."""
    fused: bool
    """Compute scores from hidden states and weight, with the logits of some columns at a time."""
    fp32: bool
    """Compute logits in float32; without it they are in the dtype of the weight. Those of a fused head always are."""


class LanguageHead(ColumnParallelLinear):  # type: ignore[misc]
    """Takes the place of a GPTModel's output layer: `forward` passes hidden states on, `score` reduces them to scores.

    Logits of a micro-batch exist only within `score`, and only of the tokens that it is asked for:

        fused    in chunks of columns, in float32; again in the backward pass, unless all fit half of the free memory
        plain    once, in the dtype of the matrix product; the backward pass overwrites them with their gradient

    Shapes: t tokens of this rank (s = t/tp of them with sequence parallelism), k of them scored, v = V/tp rows of this
    rank's share of the vocabulary, h hidden size.
    """

    def __init__(
        self, layer: ColumnParallelLinear, options: HeadOptions, *, vocab_size: int, softcap: float | None
    ) -> None:
        """Take over the parameter of `layer`, which has none if the embedding is tied and on the same rank.

        Args:
            vocab_size: number of tokens; further columns of `layer` are padding and not part of the softmax.
            softcap: logits become softcap * tanh(logits / softcap), before the temperature; None: unchanged.
        """
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=layer.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        if layer.weight is not None:
            self.weight = layer.weight
        self.options = options
        first_id = self.tp_group.rank() * self.output_size_per_partition
        self._softmax = {
            "vocab_start": first_id,
            "valid_columns": min(max(vocab_size - first_id, 0), self.output_size_per_partition),
            "inv_temperature": 1.0 / options.temperature,
            "softcap": softcap,
            "group": self.tp_group if self.tp_group.size() > 1 else None,
        }

    @override
    def forward(
        self, hidden_s1h: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return the hidden states unchanged, and no bias. `score` follows after the model's forward pass."""
        return hidden_s1h, None

    def score(
        self, hidden_s1h: Tensor, target_ids_t: Tensor, index_k: Tensor | None, weight: Tensor | None = None
    ) -> TokenScores:
        """Return the scores of this rank's tokens, [t] each, with gradient; 0 where not scored.

        Args:
            index_k: int64 [k], the tokens to score, at least one; None: all.
            weight: the tied embedding's, if this layer has no parameter.
        """
        weight = self.weight if weight is None else weight
        if self.sequence_parallel:
            hidden_s1h = gather_from_sequence_parallel_region(hidden_s1h, group=self.tp_group)
        hidden_kh = hidden_s1h[:, 0]
        if index_k is None:
            logprobs_t, entropy_t = self.score_rows(hidden_kh, weight, target_ids_t)
            return TokenScores(logprobs_T=logprobs_t, entropy_T=entropy_t)
        logprobs_k, entropy_k = self.score_rows(hidden_kh[index_k], weight, target_ids_t[index_k])
        zeros_t = logprobs_k.new_zeros(len(target_ids_t))
        return TokenScores(
            logprobs_T=zeros_t.index_copy(0, index_k, logprobs_k),
            entropy_T=zeros_t.index_copy(0, index_k, entropy_k),
        )

    def score_rows(self, hidden_kh: Tensor, weight: Tensor, target_ids_k: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, float32 [k] each."""
        needs_reduction = self.tp_group.size() > 1 and not self.sequence_parallel  # of the gradient of hidden states
        if self.options.fused:
            if needs_reduction:
                hidden_kh = copy_to_tensor_model_parallel_region(hidden_kh, group=self.tp_group)
            return linear_logprob_entropy(hidden_kh, weight, target_ids_k, **self._softmax)
        if self.options.fp32:
            hidden_kh, weight = hidden_kh.float(), float32_weight(weight)
        logits_kv = linear_with_grad_accumulation_and_async_allreduce(
            hidden_kh,
            weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion and weight.is_leaf,
            allreduce_dgrad=needs_reduction,
            sequence_parallel=False,
            tp_group=self.tp_group,
        )
        return logprob_entropy_(logits_kv, target_ids_k, **self._softmax)
