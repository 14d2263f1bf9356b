"""Causal attention over packs in plain torch.

Supports sliding windows, softcap, value heads narrower than key heads, and context parallelism.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.modeling.packed_seq import LengthGroup, TorchPackedSeqParams


class TorchAttention(MegatronModule):  # type: ignore[misc]
    """Causal self-attention over a pack, with grouped-query attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        softcap: float | None = None,
        windows: tuple[int, ...] = (),
        **_: object,
    ) -> None:
        """Create the core attention of one layer.

        Args:
            softcap: cap of the attention scores, as in `GroupedQueryAttention.softcap`.
            windows: sliding window of every decoder layer, as in `ModelArchitecture.window_sizes`.
        """
        super().__init__(config)
        assert pg_collection is not None, "core attention is built with process groups"
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self._cp_group = pg_collection.cp
        self.softcap = softcap
        self._window = windows[layer_number - 1] if windows else 0  # megatron-core numbers layers globally, from 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: TorchPackedSeqParams | None = None,
    ) -> Tensor:
        """Return [t, heads * value_dim]; t is this rank's tokens.

        Keys and values are gathered from the context-parallel ranks.

        Args:
            query: [t, heads, dim].
            key: [t, kv_heads, dim].
            value: [t, kv_heads, value_dim].
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
        for group in pack.groups:
            q = query[group.query_index_nQ].transpose(1, 2)
            k, v = (x[group.key_index_nL].transpose(1, 2) for x in (key, value))
            flat = self._attend(q, k, v, group).transpose(1, 2).reshape(-1, out_tD.shape[1])
            outputs.append(flat[group.padded_index_K])
            indices.append(group.token_index_K)
        return out_tD.index_copy(0, torch.cat(indices), torch.cat(outputs))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, group: LengthGroup) -> Tensor:
        """Attend within one length group; returns [n, heads, Q, value_dim].

        Args:
            q: [n, heads, Q, dim].
            k: [n, kv_heads, L, dim].
            v: [n, kv_heads, L, value_dim].
        """
        gqa = q.shape[1] != k.shape[1]
        if self.softcap is not None:
            return self._attend_capped(q, k, v, group.mask(self._window))
        if group.needs_no_mask(self._window):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa, scale=self.softmax_scale)
        mask = group.mask(self._window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa, scale=self.softmax_scale)

    def _attend_capped(self, q: Tensor, k: Tensor, v: Tensor, mask_n1QL: Tensor) -> Tensor:
        assert self.softcap is not None
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        scale = self.softmax_scale if self.softmax_scale is not None else q.shape[-1] ** -0.5
        scores = torch.tanh(q @ k.transpose(2, 3) * (scale / self.softcap)) * self.softcap
        weights = torch.softmax(scores.float().masked_fill(~mask_n1QL, float("-inf")), -1)
        return weights.to(v.dtype) @ v
