"""Layers in plain torch with megatron-core's interfaces, used if Transformer Engine is missing or lacks a feature.

megatron-core's local layers do not fit: `WrappedTorchNorm` rejects sequence parallelism and zero-centered weights, and
local latent attention (MLA) shards its down projections, with wrong gradients.

Attention over packs is causal. It supports sliding windows, softcap, value heads narrower than key heads, and context
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, override

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from megarl.megatron.modeling.packed_seq import LengthGroup, TorchPackedSeqParams


class TorchAttention(MegatronModule):  # type: ignore[misc]
    """Causal self-attention over a pack, with grouped-query attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        window: int = 0,
        sinks: bool = False,
        **_: object,
    ) -> None:
        """Create the core attention of one layer.

        Args:
            softmax_scale: scale of the attention scores of all layers.
            scale: that of this layer, instead of `softmax_scale`.
            softcap, window, sinks: as in `GroupedQueryAttention`.
        """
        super().__init__(config)
        assert pg_collection is not None, "core attention is built with process groups"
        scales = (scale, softmax_scale, config.softmax_scale)
        self.softmax_scale = next((each for each in scales if each is not None), None)
        self._cp_group = pg_collection.cp
        self.softcap = softcap
        self._window = window
        self.softmax_offset: torch.nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: TorchPackedSeqParams | None = None,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Return [t, heads * value_dim]; t is this rank's tokens.

        Keys and values are gathered from the context-parallel ranks.

        Args:
            query: [t, heads, dim].
            key: [t, kv_heads, dim].
            value: [t, kv_heads, value_dim].
            masks: the keys that are attended to, bool [n, 1, Q, L] for each length group; None: those of the layer.
        """
        assert isinstance(packed_seq_params, TorchPackedSeqParams), "TorchAttention needs packed sequences"
        pack = packed_seq_params
        if pack.gathered_index_T is not None:
            key, value = (
                gather_from_sequence_parallel_region(x, group=self._cp_group)[pack.gathered_index_T]
                for x in (key, value)
            )
        out_tD = query.new_empty(query.shape[0], query.shape[1] * value.shape[2])
        outputs, indices = [], []
        for group, mask in zip(pack.groups, masks or [None] * len(pack.groups), strict=True):
            q = query[group.query_index_nQ].transpose(1, 2)
            k, v = (x[group.key_index_nL].transpose(1, 2) for x in (key, value))
            flat = self._attend(q, k, v, group, mask).transpose(1, 2).reshape(-1, out_tD.shape[1])
            outputs.append(flat[group.padded_index_K])
            indices.append(group.token_index_K)
        return out_tD.index_copy(0, torch.cat(indices), torch.cat(outputs))

    @override
    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        return _sharded_state(self, prefix, sharded_offsets, {"softmax_offset": 0})

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, group: LengthGroup, mask: Tensor | None) -> Tensor:
        """Attend within one length group; returns [n, heads, Q, value_dim].

        Args:
            q: [n, heads, Q, dim].
            k: [n, kv_heads, L, dim].
            v: [n, kv_heads, L, value_dim].
        """
        gqa = q.shape[1] != k.shape[1]
        if self.softcap is not None or self.softmax_offset is not None:
            return self._attend_by_scores(q, k, v, group.mask(self._window))
        if mask is None and group.needs_no_mask(self._window):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa, scale=self.softmax_scale)
        mask = group.mask(self._window) if mask is None else mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa, scale=self.softmax_scale)

    def _attend_by_scores(self, q: Tensor, k: Tensor, v: Tensor, mask_n1QL: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        scale = self.softmax_scale if self.softmax_scale is not None else q.shape[-1] ** -0.5
        if self.softcap is None:
            scores = q @ k.transpose(2, 3) * scale
        else:
            scores = torch.tanh(q @ k.transpose(2, 3) * (scale / self.softcap)) * self.softcap
        scores = scores.float().masked_fill(~mask_n1QL, float("-inf"))
        if self.softmax_offset is None:
            return torch.softmax(scores, -1).to(v.dtype) @ v
        sinks_nHQ1 = self.softmax_offset.float()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, sinks_nHQ1], -1), -1)[..., :-1].to(v.dtype) @ v


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32 for any parameter dtype."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, zero_centered: bool | None = None
    ) -> None:
        """Create the norm of `hidden_size` elements.

        Args:
            zero_centered: multiply by 1 + weight; None: `layernorm_zero_centered_gamma` of the configuration.
        """
        super().__init__()
        self.eps = eps
        self.offset = float(config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered)
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset, dtype=config.params_dtype))
        # each tensor-parallel rank sees its slice of the sequence, so megatron-core must all-reduce this gradient
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).to(x.dtype)


class AllHeadsNorm(RMSNorm):
    """Root-mean-square norm of the queries, or keys, of all heads together, which tensor-parallel ranks split.

    Every rank has the full weight and uses that of its heads; megatron-core sums the gradients of norms of queries and
    keys over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int) -> None:
        """Create the norm of `num_heads` heads over all tensor-parallel ranks, each of width `hidden_size`."""
        super().__init__(config, num_heads * hidden_size, eps)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last two dimensions of x [..., heads, width of a head] over all tensor-parallel ranks."""
        flat = x.float().flatten(-2)
        squares = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True), group=self.tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        weight = self.weight.float().chunk(self.tp_group.size())[self.tp_group.rank()] + self.offset
        out: Tensor = flat * torch.rsqrt(squares / len(self.weight) + self.eps) * weight
        return out.to(x.dtype).view(x.shape)


class SharedHeadNorm(RMSNorm):
    """Root-mean-square norm of each head by one weight that is not zero-centered, for a tensor-parallel rank's heads.

    megatron-core sums the gradients of such weights over the ranks with sequence parallelism only.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps, zero_centered=False)
        self.tp_group = None if config.sequence_parallel else parallel_state.get_tensor_model_parallel_group()

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        weight = self.weight
        if self.tp_group is not None:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), self.eps).to(x.dtype)


class PostNormLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear followed by an RMSNorm of its output, after the tensor-parallel reduction."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class BiasedColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear with a bias, whatever the configuration says about all linears."""

    def __init__(self, *args: object, bias: bool, **kwargs: object) -> None:
        super().__init__(*args, bias=True, **kwargs)


class BiasedRowLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear with a bias, whatever the configuration says about all linears.

    The outputs of an expert are summed over the expert tensor ranks after the bias is added, so each rank adds its
    share. Every rank computes the gradient of the full bias.
    """

    def __init__(self, *args: object, bias: bool, **kwargs: object) -> None:
        super().__init__(*args, bias=True, **kwargs)
        # on one rank nothing is left to reduce, and the reduction returns a view, which an expert's MLP may not add to
        self.explicit_expert_comm = self.is_expert
        if (
            self.is_expert
        ):  # else megatron-core sums its gradients over the tensor-parallel ranks, of which each has them
            self.bias.sequence_parallel = False

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, bias = super().forward(x)
        size = self.tp_group.size()
        if self.is_expert and size > 1:
            bias = bias / size + (bias - bias.detach()) * (1 - 1 / size)
        return output, bias


class DuplicatedLinear(torch.nn.Module):
    """A linear replicated on all tensor-parallel ranks, as Transformer Engine's with `parallel_mode="duplicated"`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        **_: object,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        # as in RMSNorm
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the output and no bias."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Return the sharded state for megatron-core's dist_checkpointing: replicated over tensor-parallel ranks."""
        return _sharded_state(self, prefix, sharded_offsets, {})


def _sharded_state(
    module: torch.nn.Module, prefix: str, offsets: tuple[tuple[int, int, int], ...], axes: dict[str, int]
) -> ShardedStateDict:
    """Return a module's sharded state; `axes`: dimension that tensor-parallel ranks split, by parameter."""
    tensors = module.state_dict(prefix="", keep_vars=True)
    sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, offsets)
    return sharded


class ValueHead(torch.nn.Module):
    """Output layer with one float32 value per token, replicated on all tensor-parallel ranks.

    Each rank sees every token, so gradients are complete and equal on all ranks and need no reduction. The parameter
    is not marked as sharded or sequence-parallel, so that the gradient norm counts it once.
    """

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.is_sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group

    def forward(self, hidden_t1h: Tensor, **_: object) -> tuple[Tensor, None]:
        """Return values [t, 1, 1] of hidden states [t, 1, h] ([t/tp, 1, h] with sequence parallelism), and no bias."""
        if self.is_sequence_parallel:
            # backward: every rank has the gradient of all tokens, so each takes its slice without a reduction
            hidden_t1h = gather_from_sequence_parallel_region(
                hidden_t1h, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return F.linear(hidden_t1h.float(), float32_weight(self.weight)), None


def float32_weight(weight: Tensor) -> Tensor:
    """Return a weight in float32; its gradient is added to `main_grad` without rounding it to the weight's dtype."""
    if weight.dtype == torch.float32:
        return weight
    result: Tensor = _Float32Weight.apply(weight)  # type: ignore[no-untyped-call]
    return result


class _Float32Weight(torch.autograd.Function):
    """A conversion to float32 whose backward pass adds to `main_grad`, with megatron-core's conventions."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        ctx.weight = weight
        return weight.float()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        weight = ctx.weight
        if getattr(weight, "main_grad", None) is None:
            return gradient.to(weight.dtype)
        weight.main_grad.add_(gradient)
        # DDP reduces the gradient once autograd has stored one, and ignores its content if the flag is set
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
