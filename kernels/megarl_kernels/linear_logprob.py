"""Log-probability and entropy from hidden states, with the logits of some columns of the vocabulary at a time.

All matrix products are torch's (cuBLAS on CUDA), in chunks of columns; what is between them is `logprob_entropy.py`:

    forward     for each chunk: logits = hidden @ weight.T, and their softmax statistics, which add up over chunks
    backward    for each chunk: the logits again, their gradient, and two products that add it to both gradients

The backward pass takes the logits of the forward pass where these fit the free memory of the device.

Shapes: t tokens, v columns of the vocabulary on this rank, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl_kernels.logprob_entropy import statistics_of, write_gradient
from megarl_kernels.softmax_statistics import OutputGradients, empty_statistics, finish, merge, merge_ranks
from megarl_kernels.vocab_shard import VocabShard

MAX_CHUNKS, CHUNK_BYTES = 16, 2**28
"""The columns are computed in at most so many chunks, of at least so many bytes. Each chunk reads and writes the
float32 gradient of the hidden states once: many narrow chunks would take longer than their matrix products."""
COLUMN_MULTIPLE = 256
"""Columns of a chunk are a multiple of it, the width of cuBLAS's tiles."""
KEPT_FRACTION = 0.5
"""Part of the free memory that logits may take between the forward and the backward pass."""

dummy_gradients: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
"""The tensors that stand for weight gradients, by shape, dtype and device; `clear_dummy_gradients` frees them."""


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

    Differentiable in both results. Logits are accumulated in float32 and never rounded to the dtype of the inputs. They
    are computed in chunks of columns, and once more in the backward pass unless they fit half of the free memory. The
    results have the same bits in both cases. float64 is computed in float64.

    Under tensor parallelism, each rank passes the same hidden states and its own rows of the weight, and all ranks get
    the same results, with one all-gather. The gradient of `hidden` is this rank's part of the sum over ranks, as from
    a column-parallel linear layer without communication: the caller reduces it, in one step with what made `hidden`
    (`copy_to_tensor_model_parallel_region`, or a gather of the sequence whose backward reduces and scatters).

    Args:
        hidden: [t, h].
        weight: [v, h], the rows of this rank. Where it has an attribute `main_grad`, its gradient is added to that,
            with the conventions of megatron-core: `grad_added_to_main_grad` is set if present, and autograd gets a
            dummy gradient, one for all calls. It gets none if `zero_out_wgrad` is set, which says that the weight is
            also an embedding's, whose own gradient autograd adds.
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
    keeps_logits = (
        torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
        and len(hidden) * valid_columns * torch.float32.itemsize <= KEPT_FRACTION * free_bytes(hidden.device)
    )
    logprobs, entropy = _LinearLogprobEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, shard, keeps_logits
    )
    return logprobs, entropy


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, keeps_logits: bool
    ) -> tuple[Tensor, Tensor]:
        parts, kept = [], []
        for columns in _chunks(hidden, shard):
            logits = chunk_product(hidden, weight[columns].t())
            parts.append(statistics_of(logits, targets, shard.part(columns)))
            if keeps_logits:
                kept.append(logits)
            del logits  # before the next chunk is allocated
        if parts:
            own = merge(torch.stack(parts))
        else:
            own = empty_statistics(len(hidden), dtype=_product_dtype(hidden), device=hidden.device)
        logprobs, entropy, log_z = finish(merge_ranks(own, shard.group))
        ctx.save_for_backward(hidden, weight, targets, entropy, log_z, *kept)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, targets, entropy, log_z, *kept = ctx.saved_tensors
        outputs = OutputGradients(entropy=entropy, log_z=log_z, grad_logprobs=grad_logprobs, grad_entropy=grad_entropy)
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden, dtype=_product_dtype(hidden)) if needs_hidden else None
        weight_sum = _gradient_sum(weight) if needs_weight else None
        for number, columns in enumerate(_chunks(hidden, ctx.shard)):
            logits = kept[number] if kept else chunk_product(hidden, weight[columns].t())
            grad_logits = torch.empty_like(logits, dtype=hidden.dtype)
            write_gradient(grad_logits, logits, targets, ctx.shard.part(columns), outputs)
            del logits
            if grad_hidden is not None:
                _add_product_(grad_hidden, grad_logits, weight[columns])
            if weight_sum is not None:
                _add_product_(weight_sum[columns], grad_logits.t(), hidden)
            del grad_logits
        grad_weight = None if weight_sum is None else _gradient_to_return(weight, weight_sum)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def free_bytes(device: torch.device) -> int:
    """Return the bytes that tensors can still take on a CUDA device; 0 on others, where logits are not kept."""
    if device.type != "cuda":
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def clear_dummy_gradients() -> None:
    """Free the dummy gradients; the next backward pass allocates its own again."""
    dummy_gradients.clear()


def chunk_columns(num_tokens: int, num_columns: int, bytes_per_logit: int) -> int:
    """Return the columns of a chunk.

    Args:
        bytes_per_logit: of a logit and its gradient together.
    """
    columns = max(-(-num_columns // MAX_CHUNKS), CHUNK_BYTES // (bytes_per_logit * num_tokens))
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def _chunks(hidden: Tensor, shard: VocabShard) -> Iterator[slice]:
    """Yield the columns of each chunk; none without tokens."""
    if not len(hidden):
        return
    bytes_per_logit = _product_dtype(hidden).itemsize + hidden.dtype.itemsize
    step = chunk_columns(len(hidden), shard.valid_columns, bytes_per_logit)
    for start in range(0, shard.valid_columns, step):
        yield slice(start, min(start + step, shard.valid_columns))


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
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return None
    # megatron-core starts reducing gradients when autograd has stored one, and ignores its content as the flag is set
    key = (weight.shape, weight.dtype, weight.device)
    if key not in dummy_gradients:
        dummy_gradients[key] = torch.empty_like(weight)
    return dummy_gradients[key].detach()  # a tensor of its own, which autograd stores without a copy


def _product_dtype(matrix: Tensor) -> torch.dtype:
    return torch.promote_types(matrix.dtype, torch.float32)


def chunk_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product, accumulated and returned in float32, or in float64."""
    dtype = _product_dtype(a)
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product to `total`; in one step on CUDA, if `total` has the dtype of the product."""
    if a.is_cuda and a.dtype != total.dtype == _product_dtype(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(chunk_product(a, b))
