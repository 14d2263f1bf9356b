"""DeepSeek sparse attention: an indexer selects the keys that a query attends to (DeepSeek-V3.2, GLM-5).

Scores of all keys are computed and masked, as transformers does: memory and time grow with the square of a sequence's
length. Published kernels rotate queries and keys of the indexer by a Hadamard matrix, which changes no score, and round
them to FP8, which may change the selection.

Shapes: T tokens of a pack, t of this rank, n sequences of a length group, L its longest sequence, Q = L / cp, H heads
of the indexer, D width of a head, h hidden states, r query latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import override

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.modeling.packed_seq import LengthGroup, TorchPackedSeqParams
from megarl.megatron.modeling.rotary import attention_factor, inverse_frequencies
from megarl.megatron.modeling.torch_layers import DuplicatedLinear, TorchAttention


class SparseAttention(TorchAttention):
    """Core attention of latent attention with an indexer."""

    requires_dsa_inputs = True
    """megatron-core passes hidden states and query latents."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        attention: LatentAttention,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        """Create the core attention of one layer of a model with latent attention `attention`."""
        super().__init__(config, layer_number, softmax_scale, pg_collection)
        self.indexer = KeyIndexer(config, attention, pg_collection)

    @override
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
        x: Tensor | None = None,
        qr: Tensor | None = None,
    ) -> Tensor:
        """Return [t, heads * value_dim], as `TorchAttention` does; x, qr: the arguments of `KeyIndexer`."""
        masks = self.indexer(x, qr, packed_seq_params) if masks is None else masks
        return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params, masks=masks)


class KeyIndexer(MegatronModule):  # type: ignore[misc]
    """Selects the keys that each query attends to; its parameters are frozen."""

    def __init__(
        self, config: TransformerConfig, attention: LatentAttention, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        indexer, hidden = attention.indexer, attention.hidden_size
        assert indexer is not None, attention
        assert attention.q_lora_rank is not None, attention
        self._indexer, self._groups = indexer, pg_collection
        self._rope_factor = attention_factor(attention.rope, attention.qk_rope_head_dim)
        frequencies = inverse_frequencies(attention.rope, attention.qk_rope_head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        options = {"config": config, "init_method": config.init_method}
        self.linear_wq_b = DuplicatedLinear(attention.q_lora_rank, indexer.score_width, **options)
        self.linear_wk = DuplicatedLinear(hidden, indexer.head_dim, **options)
        self.linear_weights_proj = DuplicatedLinear(hidden, indexer.num_heads, **options)
        self.k_norm = torch.nn.LayerNorm(indexer.head_dim, eps=1e-6, dtype=torch.float32)
        self.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def forward(self, x_t1h: Tensor, latent_tr: Tensor, pack: TorchPackedSeqParams) -> list[Tensor | None]:
        """Return the selected keys by length group, bool [n, 1, Q, L]; None: all up to the query.

        Args:
            x_t1h: hidden states that the attention reads; a slice of t with sequence parallelism.
            latent_tr: normalized query latents, likewise.
        """
        indexer = self._indexer
        if all(group.key_index_nL.shape[1] <= indexer.top_k for group in pack.groups):
            return [None] * len(pack.groups)
        key_tD, weight_tH = (linear(x_t1h[:, 0])[0].float() for linear in (self.linear_wk, self.linear_weights_proj))
        if self.config.sequence_parallel:
            key_tD, weight_tH, latent_tr = (
                gather_from_sequence_parallel_region(x, group=self._groups.tp) for x in (key_tD, weight_tH, latent_tr)
            )
        key_TD = self.k_norm(key_tD)
        query_tHD = self.linear_wq_b(latent_tr)[0].float().unflatten(1, (-1, indexer.head_dim))
        if pack.gathered_index_T is not None:
            key_TD = gather_from_sequence_parallel_region(key_TD, group=self._groups.cp)[pack.gathered_index_T]
        return [self._select(query_tHD, weight_tH, key_TD, group) for group in pack.groups]

    def _select(self, query_tHD: Tensor, weight_tH: Tensor, key_TD: Tensor, group: LengthGroup) -> Tensor | None:
        """Return the selected keys of one length group; of equal scores, the earlier are selected first."""
        top_k, length = self._indexer.top_k, group.key_index_nL.shape[1]
        if length <= top_k:
            return None
        key_nLD = self._rotate(key_TD[group.key_index_nL], torch.arange(length, device=key_TD.device))
        query_nHQD = query_tHD[group.query_index_nQ].transpose(1, 2)
        query_nHQD = self._rotate(query_nHQD, group.query_position_nQ[:, None])
        weight_nQH = weight_tH[group.query_index_nQ] * self._indexer.score_width**-0.5
        score_nQL = torch.zeros((*group.query_index_nQ.shape, length), device=key_TD.device)
        for head in range(self._indexer.num_heads):  # one at a time: the scores of all take H times the memory
            score_nQL += weight_nQH[..., head, None] * torch.relu(query_nHQD[:, head] @ key_nLD.transpose(1, 2))
        seen_nQL = group.mask(0)[:, 0]
        score_nQL.masked_fill_(~seen_nQL, float("-inf"))
        lowest_nQ1 = score_nQL.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
        selected_nQL, equal_nQL = score_nQL > lowest_nQ1, score_nQL == lowest_nQ1
        left_nQ1 = top_k - selected_nQL.sum(-1, keepdim=True)
        selected_nQL |= equal_nQL & (equal_nQL.cumsum(-1, dtype=torch.int32) <= left_nQ1)
        return (selected_nQL & seen_nQL)[:, None]

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Apply RoPE to the first dimensions of x [..., D]; `position` has the shape [...] up to broadcasting.

        Interleaved pairs leave as halves: the order is the same in queries and keys, and scores do not depend on it.
        """
        angle = position[..., None] * self.inverse_frequencies
        cos, sin = angle.cos() * self._rope_factor, angle.sin() * self._rope_factor
        width = 2 * cos.shape[-1]
        rotated, rest = x[..., :width], x[..., width:]
        a, b = (rotated[..., 0::2], rotated[..., 1::2]) if self._indexer.interleaved_rope else rotated.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
