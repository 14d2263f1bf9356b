"""megatron-core's GPTModel, built from a Hugging Face config.json alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.trainer import ParallelConfig
from megarl.megatron import platform
from megarl.megatron.families.dense import DenseModel
from megarl.megatron.families.layouts import padded_vocab
from megarl.megatron.families.read import read_config
from megarl.megatron.layers import torch_block

PADDED_LOGIT = -1e9
"""Logit of vocabulary padding: must not enter the softmax (three unmasked columns cost 5e-3 in log-probability)."""


def read_model(path: str) -> DenseModel:
    """The model that `path`/config.json describes.

    Raises:
        DataError: no readable config.json there.
        ConfigError: it cannot be trained.
    """
    config, file = read_config(path)
    return DenseModel.from_hf(config, origin=str(file))


def transformer_config(model: DenseModel, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration; every fusion that needs an accelerator package is off without one."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        layernorm_epsilon=model.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.uses_sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not platform.is_cuda(),
        # Overwritten by the model folder's weights, yet needed: initialisation is what marks parameters as sharded, and
        # unmarked ones are left out of the gradient norm on all ranks but the first.
        perform_initialization=True,
        variable_seq_lengths=True,  # packs differ in length from micro-batch to micro-batch
        # megatron-core asks for this dispatcher whenever lengths vary, in dense models too
        moe_token_dispatcher_type="alltoall",  # noqa: S106
    )


def build_model(
    model: DenseModel, config: TransformerConfig, groups: ProcessGroupCollection, *, temperature: float
) -> GPTModel:
    """This rank's stage, weights not yet set. Its logits are divided by `temperature`."""
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    stage = GPTModel(
        config=config,
        transformer_layer_spec=_block(config),
        vocab_size=padded_vocab(model, groups.tp.size()),
        max_sequence_length=model.max_positions,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_embeddings,
        pg_collection=groups,
    )
    if last:
        _finish_logits(stage, model.vocab_size, groups.tp.rank(), temperature)
    return stage.to(platform.device())


def uses_transformer_engine() -> bool:
    """True where layers come from Transformer Engine rather than from `megarl.megatron.layers`."""
    if not platform.is_cuda():
        return False
    from importlib.util import find_spec

    return find_spec("transformer_engine") is not None


def _block(config: TransformerConfig) -> Any:
    if uses_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return torch_block(config)


def _finish_logits(stage: GPTModel, vocab_size: int, tp_rank: int, temperature: float) -> None:
    def hook(_: torch.nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        if temperature != 1.0:
            logits = logits / temperature
        first = tp_rank * logits.shape[-1]
        if first + logits.shape[-1] > vocab_size:
            column = torch.arange(first, first + logits.shape[-1], device=logits.device)
            logits = logits.masked_fill(column >= vocab_size, PADDED_LOGIT)
        return logits, bias

    stage.output_layer.register_forward_hook(hook)
