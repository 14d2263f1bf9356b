"""Sums of weights, by which engines prove that they hold what the trainer has sent.

Each element of a tensor has a fixed pseudo-random weight that depends on its place in the tensor only; the sum of a box
is that of its elements' bits times these weights, modulo 2**64. So the sums of disjoint boxes add up to that of their
union, wherever the boxes lie:

    engine, TP rank 1     q_proj rows 256:512                             5
    trainer               rows 256:384 on rank 2, 384:512 on rank 3       3 + 2

All weights are odd, so that a single 16-bit word that differs always changes the sum; for several the chance that it
stays is below 2**-38. The weight of word i, j, k is a(i) b(j) c(k), with factors of 64 bits, of 40 for the last
dimension. Products with these are exact in float64, so that sums are equal on all devices and for any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, Ints, ShardPiece, WeightLayout, hash_rows, intersect, slices, volume
from megarl.reshard.transfer.bucket import torch_dtype

CHUNK_ELEMENTS = 1 << 22
"""Elements that are converted to float64 at a time."""

MAX_COLUMNS = 1 << 16
"""Products of 16 bits of an element with 20 of its weight are exact in float64 for a sum of so many."""

HALVES = 0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64)
"""Odd factors of the odd and the even 20 bits of a weight of the last dimension, whose sum is odd."""


def sum_box(values: Tensor, box: Box) -> Tensor:
    """Return the sum of a box as int64 on the device of the values, shape [].

    Args:
        values: the box's elements, of any dtype and strides.
        box: where they lie in the whole tensor.
    """
    if not box:
        return sum_box(values.reshape(1), ((0, 1),))
    if len(box) == 1:
        values, box = values[None], ((0, 1), *box)
    if len(box) > 2:
        rows = torch.stack([sum_box(each, box[1:]) for each in values])
        return (rows * _factors(len(box) - 1, *box[0], values.device)).sum()
    unit = torch.uint8 if values.element_size() == 1 else torch.int16
    per_element = max(values.element_size() // 2, 1)
    first, last = box[1]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    width = max(MAX_COLUMNS // per_element, 1)
    for start in range(first, last, width):
        stop = min(start + width, last)
        columns = values[:, start - first : stop - first]
        factors = _column_factors(start * per_element, stop * per_element, values.device)
        height = max(CHUNK_ELEMENTS // (stop - start), 1)
        for row in range(0, len(values), height):
            chunk = columns[row : row + height].clone(memory_format=torch.contiguous_format)
            bits = chunk.view(unit)
            low, high = (bits.to(torch.float64) @ factors).to(torch.int64).unbind(1)
            begin = box[0][0] + row
            weights = _factors(1, begin, begin + len(chunk), values.device)
            total += ((low * HALVES[0] + high * HALVES[1]) * weights).sum()
    return total


class SumRow(NamedTuple):
    """Part of a piece of an engine's layout that a trainer rank holds."""

    local: str
    """Tensor of the trainer rank, and the part's box in it."""
    local_box: Box
    part: Box
    """The part in the whole tensor."""
    dtype: str
    """In which the engine holds it."""


@dataclass(frozen=True, slots=True)
class PartSums:
    """Sums of the parts that a trainer rank holds of the pieces of an engine's layouts: arrays [N]."""

    piece: Ints
    """Number of the piece, counted over all TP ranks."""
    part: Ints
    """Hash of the part's box."""
    elements: Ints
    total: Ints


class PartTable:
    """The parts that a trainer rank holds of the pieces of an engine's layouts; made once, summed after each sync."""

    def __init__(self, held: WeightLayout, engine: Sequence[WeightLayout]) -> None:
        """Find the parts.

        Args:
            held: layout of the trainer rank.
            engine: layouts by TP rank.
        """
        pieces_of: dict[str, list[ShardPiece]] = {}
        for piece in held.pieces:
            pieces_of.setdefault(piece.tensor, []).append(piece)
        rows: dict[SumRow, int] = {}
        found: list[tuple[int, int]] = []
        first = 0
        for layout in engine:
            is_held = np.array([name in pieces_of for name in layout.pieces.tensors], bool)
            for number in np.flatnonzero(is_held[layout.pieces.columns.tensor]).tolist():
                need = layout.pieces[number]
                for own in pieces_of[need.tensor]:
                    part = intersect(own.box, need.box)
                    if part is not None:
                        in_local = tuple(
                            (low - start + at, high - start + at)
                            for (low, high), (start, _), (at, _) in zip(part, own.box, own.local_box, strict=True)
                        )
                        row = SumRow(own.local, in_local, part, layout.tensors[need.tensor].dtype)
                        found.append((first + number, rows.setdefault(row, len(rows))))
            first += len(layout.pieces)
        self._rows = list(rows)
        self._piece, self._row = np.array(found, np.int64).reshape(-1, 2).T

    def sum(self, tensors: Mapping[str, Tensor]) -> PartSums:
        """Return the sums of all parts.

        Args:
            tensors: the rank's tensors under the names of its layout, as they are sent.
        """
        sums = [
            sum_box(tensors[row.local][slices(row.local_box)].to(torch_dtype(row.dtype)), row.part)
            for row in self._rows
        ]
        total = torch.stack(sums).cpu().numpy() if sums else np.zeros(0, np.int64)
        width = max((len(row.part) for row in self._rows), default=0)
        edges = np.full((len(self._rows), 2 * width), -1, np.int64)
        for number, row in enumerate(self._rows):
            edges[number, : 2 * len(row.part)] = np.ravel(row.part)
        part = hash_rows([np.full(len(edges), width), *edges.T]).view(np.int64)
        elements = np.array([volume(row.part) for row in self._rows], np.int64)
        return PartSums(self._piece, part[self._row], elements[self._row], total[self._row])


def add_parts(engine: Sequence[WeightLayout], by_rank: Sequence[PartSums]) -> list[Ints]:
    """Return by TP rank the sums that the pieces of its layout should have.

    Raises WeightSyncError if two trainer ranks hold the same box with different values, or none holds part of a piece.

    Args:
        engine: layouts by TP rank.
        by_rank: by trainer rank.
    """
    rank = np.repeat(np.arange(len(by_rank)), [len(sums.piece) for sums in by_rank])
    piece, part, elements, total = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(sums, name) for sums in by_rank)])
        for name in PartSums.__slots__
    )
    order = np.lexsort((rank, part, piece))
    rank, piece, part, elements, total = (column[order] for column in (rank, piece, part, elements, total))
    is_first = np.r_[True, (np.diff(piece) != 0) | (np.diff(part) != 0)][: len(piece)]
    first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    different = np.flatnonzero(total != total[first])
    if len(different):
        row = different[0]
        found = _piece(engine, piece[row])
        raise WeightSyncError(
            f"trainer ranks {rank[first[row]]} and {rank[row]} hold different values of {found.tensor} at "
            f"{list(found.box)}"
        )
    count = sum(len(layout.pieces) for layout in engine)
    sums, covered = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(sums, piece[is_first], total[is_first])
    np.add.at(covered, piece[is_first], elements[is_first])
    needed = np.concatenate([layout.pieces.num_elements for layout in engine])
    lacking = np.flatnonzero(covered != needed)
    if len(lacking):
        found = _piece(engine, lacking[0])
        raise WeightSyncError(
            f"trainer ranks do not hold all of {found.tensor} at {list(found.box)}, or hold parts of it twice"
        )
    return np.split(sums, np.cumsum([len(layout.pieces) for layout in engine])[:-1])


def _piece(engine: Sequence[WeightLayout], number: int) -> ShardPiece:
    """Return a piece, counted over all layouts."""
    return next(islice(chain.from_iterable(layout.pieces for layout in engine), number, None))


@lru_cache(maxsize=512)
def _factors(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return odd factors int64 [stop - start] of the indices of a dimension, counted from the last one."""
    return torch.from_numpy(random_factors(dim, start, stop).view(np.int64)).to(device)


@lru_cache(maxsize=64)
def _column_factors(start: int, stop: int, device: torch.device) -> Tensor:
    """Return an odd and an even factor below 2**20 of the indices of the last dimension, float64 [stop - start, 2]."""
    random = random_factors(0, start, stop)
    halves = np.stack([random & np.uint64(0xFFFFF), (random >> np.uint64(40)) & np.uint64(0xFFFFE)], axis=1)
    return torch.from_numpy(halves.astype(np.float64)).to(device)


def random_factors(dim: int, start: int, stop: int) -> np.ndarray:
    """Return odd pseudo-random numbers uint64 [stop - start] of the indices of a dimension."""
    index = np.arange(start, stop, dtype=np.int64)
    found: np.ndarray = hash_rows([np.full_like(index, dim + 1), index]) | np.uint64(1)
    return found
