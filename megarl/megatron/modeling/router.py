"""Routers of experts, whose auxiliary losses and counts are of real tokens only: padding counts nowhere.

Let N be the real tokens of an update (of all its micro-batches and data-parallel replicas), E the experts, k the
experts of a token, and p_te the score of expert e for token t. The load-balancing loss of a layer (Switch Transformer,
arXiv 2101.03961, equations 4 to 6) is

    coefficient * E / N * sum over real tokens t and experts e of f_ge p_te,

where f_ge is the share of expert e in the k * n choices of the n tokens of t's group g, without a gradient. The groups
are the scope of the loss: micro-batches, sequences, or the update up to and including the micro-batch. So a group
weighs by its real tokens, however the update is packed. The z-loss (ST-MoE, arXiv 2202.08906, equation 5) is

    coefficient / N * sum over real tokens t of (logsumexp over experts of the logits of t)^2.

Shapes: t tokens of a pack on this rank (with sequence parallelism, its shard of them), B rows of a token mask, E
experts, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megarl.batch.pack import PackedBatch
from megarl.megatron.modeling.packed_seq import TorchPackedSeqParams
from megarl.megatron.modeling.router_replay import RouteReplay, RouteShape

LOAD_BALANCING_TYPES = {"micro_batch": "aux_loss", "sequence": "seq_aux_loss", "global_batch": "global_aux_loss"}
"""Scope of the load-balancing loss -> megatron-core's `moe_router_load_balancing_type`."""


def router_mask(
    packed: PackedBatch, lengths: Sequence[int], config: TransformerConfig, groups: ProcessGroupCollection
) -> Tensor:
    """Return what the routers of this rank know about its tokens, bool [B, t].

    Row 0 marks padding. With the scope `sequence`, the other rows are the binary digits of the number of the token's
    sequence: megatron-core passes nothing but this mask to a router, as booleans, and again when it recomputes it.

    Args:
        packed: the pack, or the share of it of this context-parallel rank.
        lengths: tokens of the sequences, without padding.
    """
    num_sequences = len(packed.cu_seqlens_S) - 1
    lengths_S = torch.zeros(num_sequences, dtype=torch.int64)
    lengths_S[: len(lengths)] = torch.tensor(lengths, dtype=torch.int64)
    rows = [packed.position_ids_T >= lengths_S[packed.sequence_ids_T]]
    if config.moe_router_load_balancing_type == LOAD_BALANCING_TYPES["sequence"]:
        rows += [packed.sequence_ids_T >> digit & 1 == 1 for digit in range((num_sequences - 1).bit_length())]
    mask_Bt = torch.stack(rows)
    if config.sequence_parallel:
        mask_Bt = mask_Bt.chunk(groups.tp.size(), dim=1)[groups.tp.rank()].contiguous()
    return mask_Bt


class PackRouter(TopKRouter):  # type: ignore[misc]
    """A router whose auxiliary losses are those of this module instead of megatron-core's."""

    token_weight: Tensor
    """Scalar on the device: 1 / N, times what megatron-core and DDP divide auxiliary losses by; set for each update."""

    router_replay: RouteReplay | None
    """Set if the routes of packs are replayed; megatron-core then takes the experts that it chooses."""

    def start_update(self, token_weight: Tensor) -> None:
        """Set the weight of the tokens of an update, before its first micro-batch."""
        self.token_weight = token_weight
        self.reset_global_aux_loss_tracker()

    @override
    def is_aux_loss_enabled(self) -> bool:
        """Return False: megatron-core's load-balancing losses, which count padding, are not applied."""
        return False

    @override
    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the probabilities and the chosen experts of tokens, [t, E] each.

        Args:
            logits: [t, 1, E].
            padding_mask: the transposed `router_mask`, [t, B], with the rows of a route if routes are replayed.
        """
        assert padding_mask is not None, "a router needs to know which tokens are padding"
        if self.router_replay is not None:
            padding_mask, self.router_replay.given_tk = self.router_replay.shape.split_rows(padding_mask)
        padding_t = padding_mask[:, 0]
        probs_tE, map_tE = super().routing(logits, padding_t)
        coefficient = self.config.moe_aux_loss_coeff
        if coefficient and self.training and torch.is_grad_enabled():
            loss = self._balancing_loss(logits[:, 0], padding_t, padding_mask[:, 1:])
            probs_tE = MoEAuxLossAutoScaler.apply(probs_tE, coefficient * self.token_weight * loss)
        return probs_tE, map_tE

    def _balancing_loss(self, logits_tE: Tensor, padding_t: Tensor, digits_tB: Tensor) -> Tensor:
        """Return this rank's part of the load-balancing loss times N, without its coefficient."""
        map_tE, scores_tE = compute_routing_scores_for_aux_loss(
            logits_tE, self.topk, self.score_function, self.config.moe_router_fusion, padding_t
        )
        num_digits = digits_tB.shape[1]
        ids_t = (digits_tB << torch.arange(num_digits, device=digits_tB.device)).sum(1)
        zeros_GE = scores_tE.new_zeros(2**num_digits, self.num_experts)
        counts_GE = zeros_GE.index_add(0, ids_t, map_tE.to(zeros_GE.dtype))
        is_global = self.global_tokens_per_expert is not None
        group = self.tp_dp_cp_group if is_global else self.tp_cp_group
        if group.size() > 1:
            dist.all_reduce(counts_GE, group=group)
        if is_global:
            self.global_tokens_per_expert += counts_GE[0]
            counts_GE = self.global_tokens_per_expert[None]
        shares_GE = counts_GE / counts_GE.sum(1, keepdim=True).clamp(min=1)
        loss: Tensor = self.num_experts * (shares_GE * zeros_GE.index_add(0, ids_t, scores_tE)).sum()
        return loss

    @override
    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits [t, E], with the z-loss attached."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        assert padding_mask is not None
        squares_t = torch.logsumexp(logits, dim=-1).square().masked_fill(padding_mask, 0.0)
        out: Tensor = MoEAuxLossAutoScaler.apply(logits, coefficient * self.token_weight * squares_t.sum())
        return out

    @override
    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the real tokens of each expert; megatron-core's own mask has a shape that does not fit the map."""
        assert padding_mask is not None
        super()._apply_expert_bias(routing_map & ~padding_mask[:, None])


class BiasedRouter(PackRouter):
    """A router whose logits have a bias, in a model whose linears have none by configuration."""

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.bias = nn.Parameter(torch.zeros(self.num_experts, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackLayer(TransformerLayer):  # type: ignore[misc]
    """A decoder layer that passes its router mask and routes in the description of the pack, on every pipeline stage.

    megatron-core passes the mask from the embedding on, so that the routers of later stages get no part of it, and the
    same rotary position embedding to all layers.
    """

    rotary: RotaryEmbedding | None
    """Rotary position embedding of this layer; None: that of the model."""

    @override
    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: TorchPackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.rotary is not None:
            assert packed_seq_params is not None, "megarl's models compute packed sequences only"
            rotary_pos_emb = self.rotary(packed_seq_params.max_seqlen_q, packed_seq=True)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs)

    @override
    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: BaseInferenceContext | None = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: TorchPackedSeqParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "megarl's models compute packed sequences only"
        mask_Bt, routes = packed_seq_params.router_mask_Bt, packed_seq_params.routes
        replay = self.mlp.router.router_replay if isinstance(self.mlp, MoELayer) else None
        known_tk = None
        if replay is not None:
            assert mask_Bt is not None
            assert routes is not None
            known_tk = routes.by_layer.get(self.layer_number)
            mask_Bt = replay.shape.add_rows(mask_Bt, known_tk)
        out: Tensor = super()._forward_mlp(hidden_states, inference_context, mask_Bt, packed_seq_params)
        if routes is not None and replay is not None and known_tk is None:
            routes.by_layer[self.layer_number] = replay.chosen_tk
        return out


def replay_routes(modules: Iterable[nn.Module], shape: RouteShape) -> None:
    """Make the routers of model chunks replay the routes of packs."""
    for router in find_routers(modules):
        router.router_replay = RouteReplay(shape)


def find_routers(modules: Iterable[nn.Module]) -> Iterator[PackRouter]:
    """Yield the routers of model chunks."""
    for module in modules:
        yield from (each for each in module.modules() if isinstance(each, PackRouter))
