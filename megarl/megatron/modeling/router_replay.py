"""Router replay: later passes over a token take the experts that an earlier one has chosen (arXiv 2510.11370).

A route is the set of experts of a token in a layer. A replayed route replaces the choice only: the weights of its
experts come from the current scores of the router, through which the gradient flows as it does without replay.

    PackRoutes of a micro-batch -- PackLayer -> bits in the mask -- megatron-core -> PackRouter -> RouteReplay (top-k)

The bits travel in the mask because megatron-core passes nothing else to a router, also where it recomputes a layer.
A token without a route, such as padding, has the same expert k times; the router chooses its experts.

Shapes: t tokens of a pack on this rank (with sequence parallelism, its shard of them), T of the full pack, L layers
with experts of the model, k experts of a token, E experts, b bits of the number of an expert, B rows of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megarl.batch.trajectory import Routes, route_dtype
from megarl.megatron.families.architecture import ModelArchitecture

_DEVICE_DTYPES = {np.uint8: torch.uint8, np.uint16: torch.int16}
"""Type of routes on the host -> on a device, where torch has few operations for uint16."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Sizes of the routes of a model."""

    layers: tuple[int, ...]
    """Numbers, from 1, of the L layers with experts."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, architecture: ModelArchitecture) -> RouteShape:
        """Return the sizes for a model with experts."""
        assert architecture.experts is not None
        layers = tuple(number for number, layer in enumerate(architecture.layers, 1) if layer.has_routed_experts)
        return cls(layers, architecture.experts.routing.top_k, architecture.num_experts)

    @property
    def dtype(self) -> torch.dtype:
        """Type of routes on a device."""
        return _DEVICE_DTYPES[route_dtype(self.num_experts)]

    @property
    def num_bits(self) -> int:
        """Bits of the number of an expert."""
        return (self.num_experts - 1).bit_length()

    @property
    def num_rows(self) -> int:
        """Mask rows of a route."""
        return self.top_k * self.num_bits

    def pack(self, routes: Sequence[Routes | None], cu_seqlens_S: Tensor) -> Tensor:
        """Return the routes of a full pack on the host, [T, L, k].

        Args:
            routes: of each sequence [n, L, k]; None: it has none.
        """
        starts = cu_seqlens_S.tolist()
        out = torch.zeros(starts[-1], len(self.layers), self.top_k, dtype=self.dtype)
        host = out.numpy()
        for start, of_sequence in zip(starts, routes, strict=False):
            if of_sequence is not None:
                host[start : start + len(of_sequence)] = of_sequence
        return out

    def add_rows(self, mask_Bt: Tensor, routes_tk: Tensor | None) -> Tensor:
        """Return the mask with the bits of the routes as its last rows; None: of tokens without routes."""
        if routes_tk is None:
            return torch.cat([mask_Bt, mask_Bt.new_zeros(self.num_rows, mask_Bt.shape[1])])
        shifts_b1 = torch.arange(self.num_bits, device=mask_Bt.device)[:, None]
        bits_kbt = (routes_tk.T[:, None].long() >> shifts_b1) & 1 == 1
        return torch.cat([mask_Bt, bits_kbt.flatten(0, 1)])

    def split_rows(self, mask_tB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transposed mask without the rows of `add_rows`, and the routes in these, int64 [t, k]."""
        bits_tkb = mask_tB[:, -self.num_rows :].reshape(len(mask_tB), self.top_k, self.num_bits)
        shifts_b = torch.arange(self.num_bits, device=mask_tB.device)
        return mask_tB[:, : -self.num_rows], (bits_tkb.long() << shifts_b).sum(-1)


@dataclass
class PackRoutes:
    """The routes of a micro-batch on this rank, given or recorded by its first forward pass."""

    by_layer: dict[int, Tensor] = field(default_factory=dict)
    """Number of each layer with experts of this rank -> `RouteShape.dtype` [t, k]."""


class RouteReplay:
    """Chooses the experts of one router: an object that megatron-core's router asks in place of its own top-k."""

    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        self.given_tk: Tensor | None = None
        """Routes of the pass, int64."""
        self.chosen_tk: Tensor | None = None
        """What the last pass has chosen, `RouteShape.dtype`."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the experts of each token, [t, k] each; `scores`: [t, E]."""
        assert self.given_tk is not None
        _, own_tk = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        has_route_t1 = self.given_tk[:, :1] != self.given_tk[:, 1:2]
        index_tk = torch.where(has_route_t1, self.given_tk, own_tk)
        self.chosen_tk = index_tk.to(self.shape.dtype)
        return scores.gather(1, index_tk), index_tk
