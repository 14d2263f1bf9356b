"""Log-probability and entropy from hidden states, without the logits.

Shapes: t tokens, v columns of the vocabulary on this rank, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl_kernels.backend import uses_triton
from megarl_kernels.linear_logprob_triton import triton_gradients_, triton_statistics
from megarl_kernels.softmax_statistics import (
    OutputGradients,
    add_tile_,
    empty_statistics,
    finish,
    gradient_,
    merge_ranks,
)
from megarl_kernels.vocab_shard import VocabShard

TILE_TOKENS = 1024
TILE_COLUMNS = 2048
"""The reference computes the logits of so many tokens and columns at a time: 8 MiB in float32."""


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_start: int,
    valid_columns: int,
    inv_temperature: float = 1.0,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies in nats, float32 [t] each, of softmax(scores of hidden @ weight.T).

    Differentiable in both results. Logits are accumulated in float32 and never rounded to the dtype of the inputs; no
    tensor [t, v] is made, and the backward pass computes them once more. float64 is computed in float64.

    Under tensor parallelism, each rank passes the same hidden states and its own rows of the weight, and all ranks get
    the same results, with one all-gather. The gradient of `hidden` is this rank's part of the sum over ranks, as from
    a column-parallel linear layer without communication: the caller reduces it, in one step with what made `hidden`
    (`copy_to_tensor_model_parallel_region`, or a gather of the sequence whose backward reduces and scatters).

    Args:
        hidden: [t, h].
        weight: [v, h], the rows of this rank. Where it has an attribute `main_grad`, its gradient is added to that,
            with the conventions of megatron-core: `grad_added_to_main_grad` is set if present, and the returned
            gradient is a placeholder (zeros if `zero_out_wgrad`).
        targets: int64 [t], vocabulary ids below the size of the vocabulary; each is in one rank's valid columns.
        vocab_start: vocabulary id of this rank's first row.
        valid_columns: number of this rank's rows that are not padding.
        inv_temperature: factor of the logits, after the softcap.
        softcap: logits become softcap * tanh(logits / softcap).
        group: ranks that hold the other rows.

    Raises:
        ValueError: shapes or dtypes of the tensors do not fit together.
    """
    shard = VocabShard(
        start=vocab_start,
        valid_columns=valid_columns,
        inv_temperature=inv_temperature,
        softcap=softcap,
        group=group,
    )
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden [t, h] and weight [v, h] need one h and one dtype, got {list(hidden.shape)} {hidden.dtype} and "
            f"{list(weight.shape)} {weight.dtype}"
        )
    shard.check(len(weight), targets, len(hidden))
    logprobs, entropy = _LinearLogprobEntropy.apply(hidden, weight, targets, shard)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
        statistics = merge_ranks(_statistics(hidden, weight, targets, shard), shard.group)
        logprobs, entropy, log_z = finish(statistics)
        ctx.save_for_backward(hidden, weight, targets, entropy, log_z)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None
        hidden, weight, targets, entropy, log_z = ctx.saved_tensors
        outputs = OutputGradients(entropy=entropy, log_z=log_z, grad_logprobs=grad_logprobs, grad_entropy=grad_entropy)
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        weight_sum = _gradient_sum(weight) if needs_weight else None
        compute = triton_gradients_ if uses_triton(hidden) else reference_gradients_
        grad_hidden = compute(weight_sum, hidden, weight, targets, ctx.shard, outputs)
        grad_weight = None if weight_sum is None else _gradient_to_return(weight, weight_sum)
        return grad_hidden.to(hidden.dtype) if needs_hidden else None, grad_weight, None, None


def _gradient_sum(weight: Tensor) -> Tensor:
    """Return the tensor that the gradient of `weight` is added to: its `main_grad`, or zeros."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return torch.zeros_like(weight) if main_grad is None else main_grad.view(weight.shape)


def _gradient_to_return(weight: Tensor, weight_sum: Tensor) -> Tensor | None:
    """Return what autograd is to add to `weight.grad`, as megatron-core's linear layers do."""
    if getattr(weight, "main_grad", None) is None:
        return weight_sum
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # megatron-core starts reducing gradients when autograd has stored one, and ignores its content if the flag is set
    weight.grad_added_to_main_grad = True
    zeros = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


def _statistics(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    return (triton_statistics if uses_triton(hidden) else reference_statistics)(hidden, weight, targets, shard)


def reference_statistics(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """Return the softmax statistics [t, 4] of this rank's columns."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    statistics = empty_statistics(len(hidden), dtype=dtype, device=hidden.device)
    for columns in _ranges(shard.valid_columns, TILE_COLUMNS):
        weight_tile = weight[columns].to(dtype)
        for rows in _ranges(len(hidden), TILE_TOKENS):
            scores = shard.scores_(hidden[rows].to(dtype) @ weight_tile.t())
            add_tile_(statistics[rows], scores, targets[rows] - (shard.start + columns.start))
    return statistics


def reference_gradients_(
    weight_sum: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    outputs: OutputGradients,
) -> Tensor:
    """Return the gradient of `hidden`, float32 [t, h], and add that of `weight` to `weight_sum` [v, h], if given."""
    dtype = outputs.log_z.dtype
    grad_hidden = torch.zeros_like(hidden, dtype=dtype)
    for columns in _ranges(shard.valid_columns, TILE_COLUMNS):
        weight_tile = weight[columns].to(dtype)
        grad_weight = torch.zeros_like(weight_tile)
        for rows in _ranges(len(hidden), TILE_TOKENS):
            hidden_tile = hidden[rows].to(dtype)
            grad_logits = gradient_(
                shard.scores_(hidden_tile @ weight_tile.t()),
                targets[rows] - (shard.start + columns.start),
                shard,
                outputs[rows],
            )
            grad_hidden[rows].addmm_(grad_logits, weight_tile)
            if weight_sum is not None:
                grad_weight.addmm_(grad_logits.t(), hidden_tile)
        if weight_sum is not None:
            weight_sum[columns].add_(grad_weight)
    return grad_hidden


def _ranges(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
