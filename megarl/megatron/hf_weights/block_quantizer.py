"""Quantizes this rank's weights to FP8 for engines that need them so, before each weight sync.

    held tensors     bfloat16 shards
    maxima           the largest magnitude of each block, in this rank's part of it
    all-reduce       over the tensor-parallel ranks, of the blocks that shards cut; none if they cut none
    quantized        FP8 values and scales, beside the held tensors, until the sync has ended

The all-reduce is one call for all weights of a group, in the trainer's process group and with its time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.model_files.block_fp8 import BLOCK, scale_shape
from megarl.reshard.layout.layout import WeightLayout, slices
from megarl.reshard.layout.quantized_layout import QuantizedPiece, find_quantized_pieces, quantize_layout
from megarl_kernels import fp8_block_encode, fp8_block_maxima, fp8_block_scales


class BlockQuantizer:
    """Quantizes some weights of one rank. Collective over the ranks that share weights, as is every call."""

    def __init__(
        self,
        layout: WeightLayout,
        names: Collection[str],
        groups: Sequence[dist.ProcessGroup],
        group_number: Callable[[str], int],
    ) -> None:
        """Find out which blocks ranks share.

        Args:
            layout: what this rank holds.
            names: weights to quantize.
            groups: groups of this rank that share weights, in the same order on all ranks.
            group_number: returns the index of the group that shares a local tensor.
        """
        self.layout = quantize_layout(layout, names)
        """What this rank sends."""
        self._shape = {name: layout.tensors[name].shape for name in names}
        self._pieces = find_quantized_pieces(layout, names)
        self._shared = [
            (group, self._find_shared(group, number, group_number))
            for number, group in enumerate(groups)
            if group.size() > 1
        ]
        self.num_bytes = 0
        """Memory of the values and scales of the last call."""

    def quantize(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that `layout` names, of which those that are quantized are new.

        Args:
            tensors: what this rank holds, by local name.
        """
        maxima = self._find_maxima(tensors)
        for group, names in self._shared:
            if not names:
                continue
            grids = [maxima.setdefault(name, self._empty_grid(name, tensors)) for name in names]
            flat = torch.cat([grid.view(-1) for grid in grids])
            dist.all_reduce(flat, dist.ReduceOp.MAX, group)
            for grid, part in zip(grids, torch.split(flat, [grid.numel() for grid in grids]), strict=True):
                grid.copy_(part.view(grid.shape))
        scales = {name: fp8_block_scales(grid) for name, grid in maxima.items()}
        quantized: dict[str, Tensor] = {}
        for piece in self._pieces:
            held = tensors[piece.source.local]
            weight = held[slices(piece.source.local_box)]
            if piece.values not in quantized:
                quantized[piece.values] = torch.empty(held.shape, dtype=torch.float8_e4m3fn, device=held.device)
            out = quantized[piece.values][slices(piece.source.local_box)]
            of_weight = scales[piece.source.tensor]
            fp8_block_encode(weight, of_weight[slices(piece.touched_blocks)], out, **_offsets(piece))
            quantized[piece.scales] = of_weight[slices(piece.scale_box)].contiguous()
        self.num_bytes = sum(tensor.nbytes for tensor in quantized.values())
        return {**tensors, **quantized}

    def _find_maxima(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the largest magnitude of this rank's part of each block, by weight; 0 where it has no part."""
        maxima: dict[str, Tensor] = {}
        for piece in self._pieces:
            name = piece.source.tensor
            grid = maxima.setdefault(name, self._empty_grid(name, tensors))
            part = grid[slices(piece.touched_blocks)]
            weight = tensors[piece.source.local][slices(piece.source.local_box)]
            torch.maximum(part, fp8_block_maxima(weight, **_offsets(piece)), out=part)
        return maxima

    def _empty_grid(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        device = next(iter(tensors.values())).device
        return torch.zeros(scale_shape(self._shape[name]), dtype=torch.float32, device=device)

    def _find_shared(self, group: dist.ProcessGroup, number: int, group_number: Callable[[str], int]) -> list[str]:
        """Return the weights of which the ranks of the group share blocks, in the same order on all of them."""
        cut = {
            piece.source.tensor
            for piece in self._pieces
            if group_number(piece.source.local) == number and piece.cuts_blocks(self._shape[piece.source.tensor])
        }
        gathered: list[list[str]] = [[]] * group.size()
        dist.all_gather_object(gathered, sorted(cut), group)
        return sorted(set().union(*gathered))


def _offsets(piece: QuantizedPiece) -> dict[str, int]:
    (row, _), (column, _) = piece.source.box
    return {"row_offset": row % BLOCK, "column_offset": column % BLOCK}
