"""Copies of many strided boxes of memory in one launch, with an optional checksum of each.

A box is `rows` runs of `row_bytes` contiguous bytes. Packing a bucket of a weight sync copies boxes of parameters to
contiguous memory, unpacking copies them back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl_kernels.backend import jit, tl, triton, uses_triton

WORD = 8
"""Bytes of a word of the checksum."""
TILE_WORDS = 1024
"""Words that a Triton program copies at a time. Not tuned."""
MAX_PROGRAMS = 64
"""Most programs that share a box. Not tuned."""

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxTable:
    """Sources and destinations of n boxes, on one device. Made once, for any number of copies."""

    sources: tuple[Tensor, ...]
    destinations: tuple[Tensor, ...]
    """Matrices [rows, columns], whose rows are contiguous."""
    descriptors: Tensor
    """int64 [n, 6], on the device: address and row stride of the source, of the destination, rows, and bytes of a row.

    Strides are in bytes. The addresses are those of `sources` and `destinations`, which this table keeps alive.
    """
    unit: int
    """Bytes by which all boxes can be read and written: a power of two, at most 8."""
    most_words: int
    """Number of words of the largest box."""

    @classmethod
    def of(cls, boxes: Sequence[tuple[Tensor, Tensor]]) -> BoxTable:
        """Describe copies from the first to the second tensor of each pair.

        Both are vectors or matrices of one shape and dtype, with contiguous rows. No destination overlaps another
        destination or a source.

        Raises:
            ValueError: there are no boxes, or a box cannot be described.
        """
        if not boxes:
            raise ValueError("a table of boxes needs at least one")
        device = boxes[0][0].device
        pairs = [(_as_matrix(source), _as_matrix(destination)) for source, destination in boxes]
        lines = []
        for number, (a, b) in enumerate(pairs):
            if a.shape != b.shape or a.dtype != b.dtype or {a.device, b.device} != {device}:
                raise ValueError(
                    f"box {number} needs one shape and dtype on {device}, got {list(a.shape)} {a.dtype} on {a.device} "
                    f"and {list(b.shape)} {b.dtype} on {b.device}"
                )
            size = a.element_size()
            row_bytes = a.shape[1] * size
            ends = (x for y in (a, b) for x in (y.data_ptr(), y.stride(0) * size if len(y) > 1 else row_bytes))
            lines.append([*ends, len(a), row_bytes])
        words = [rows * -(-row_bytes // WORD) for *_, rows, row_bytes in lines]
        if max(words) >= 2**31:
            raise ValueError(f"box {words.index(max(words))} has 16 GiB or more: cut it")
        return cls(
            sources=tuple(a for a, _ in pairs),
            destinations=tuple(b for _, b in pairs),
            descriptors=torch.tensor(lines, dtype=torch.int64, device=device),
            unit=math.gcd(WORD, *(x for *ends, _, row_bytes in lines for x in (*ends, row_bytes))),
            most_words=max(words),
        )


def copy_boxes(table: BoxTable, *, checksum: bool = False) -> Tensor | None:
    """Copy all boxes of the table; returns int64 [n], a checksum of the bytes of each box, if asked for.

    The checksum has 64 bits and depends on bytes and their place in the box, not on addresses and strides. It is the
    sum of splitmix64(word + 2**64 / golden ratio * (i + 1)) over the words i of 8 bytes, where the last word of each
    row is filled up with zeros.
    """
    if uses_triton(table.descriptors):
        return _launch(table, checksum=checksum, copy=True)
    return _reference_copy(table, checksum)


def checksum_boxes(boxes: Sequence[Tensor]) -> Tensor:
    """Return int64 [n], the checksums of `copy_boxes` of the bytes of each box, without copying them.

    Boxes are given as for `BoxTable.of`. A change of one word always changes the sum, since splitmix64 is a bijection;
    other changes leave it as it is with a chance of about 2**-64.
    """
    table = BoxTable.of([(box, box) for box in boxes])
    if not uses_triton(table.descriptors):
        return torch.stack([_reference_checksum(source) for source in table.sources])
    checksums = _launch(table, checksum=True, copy=False)
    assert checksums is not None
    return checksums


def _as_matrix(tensor: Tensor) -> Tensor:
    matrix = tensor[None] if tensor.ndim == 1 else tensor
    if matrix.ndim != 2 or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(
            f"a box needs one or two dimensions and contiguous rows, got {list(tensor.shape)} with strides "
            f"{list(tensor.stride())}"
        )
    return matrix


def _reference_copy(table: BoxTable, checksum: bool) -> Tensor | None:
    for source, destination in zip(table.sources, table.destinations, strict=True):
        destination.copy_(source)
    return torch.stack([_reference_checksum(source) for source in table.sources]) if checksum else None


def _reference_checksum(matrix: Tensor) -> Tensor:
    data = matrix.contiguous().view(torch.uint8).view(len(matrix), -1)
    words = torch.nn.functional.pad(data, (0, -data.shape[1] % WORD)).view(torch.int64).flatten()
    x = words + torch.arange(1, len(words) + 1, device=words.device) * _signed(GOLDEN)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return (x ^ _shift_right(x, 31)).sum()


def _signed(bits: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    return bits - 2**64 if bits >= 2**63 else bits


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """Shift as unsigned numbers."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _launch(table: BoxTable, *, checksum: bool, copy: bool) -> Tensor | None:
    checksums = torch.zeros(len(table.sources), dtype=torch.int64, device=table.descriptors.device)
    if table.most_words:
        programs = min(MAX_PROGRAMS, triton.cdiv(table.most_words, TILE_WORDS))
        _copy_kernel[(len(table.sources), programs)](
            table.descriptors,
            checksums,
            CHECKSUM=checksum,
            COPY=copy,
            UNIT=table.unit,
            TILE=TILE_WORDS,
            GOLDEN_RATIO=GOLDEN,
            FACTOR_1=FACTORS[0],
            FACTOR_2=FACTORS[1],
            num_warps=4,
        )
    return checksums if checksum else None


@jit
def _copy_unit(
    source: tl.tensor, destination: tl.tensor, inside: tl.tensor, UNIT: tl.constexpr, COPY: tl.constexpr
) -> tl.tensor:
    """Return `UNIT` bytes at each of the addresses, int64, as uint64; with `COPY`, store them at the destinations."""
    if UNIT == 8:
        data = tl.load(source.to(tl.pointer_type(tl.uint64)), mask=inside, other=0)
        if COPY:
            tl.store(destination.to(tl.pointer_type(tl.uint64)), data, mask=inside)
    elif UNIT == 4:
        data = tl.load(source.to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
        if COPY:
            tl.store(destination.to(tl.pointer_type(tl.uint32)), data, mask=inside)
    elif UNIT == 2:
        data = tl.load(source.to(tl.pointer_type(tl.uint16)), mask=inside, other=0)
        if COPY:
            tl.store(destination.to(tl.pointer_type(tl.uint16)), data, mask=inside)
    else:
        data = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
        if COPY:
            tl.store(destination.to(tl.pointer_type(tl.uint8)), data, mask=inside)
    return data.to(tl.uint64)


@jit
def _copy_kernel(
    descriptors: tl.tensor,
    checksums: tl.tensor,
    CHECKSUM: tl.constexpr,
    COPY: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    GOLDEN_RATIO: tl.constexpr,
    FACTOR_1: tl.constexpr,
    FACTOR_2: tl.constexpr,
) -> None:
    """Copy every `num_programs(1)`-th tile of words of one box, or sum up its checksum, or both."""
    box = tl.program_id(0)
    line = descriptors + box * 6
    source, source_stride = tl.load(line), tl.load(line + 1)
    destination, destination_stride = tl.load(line + 2), tl.load(line + 3)
    rows, row_bytes = tl.load(line + 4).to(tl.int32), tl.load(line + 5)
    row_words = ((row_bytes + 7) // 8).to(tl.int32)
    num_words = rows * row_words
    units = tl.arange(0, 8 // UNIT)
    total = tl.zeros((TILE,), tl.uint64)
    for start in range(tl.program_id(1) * TILE, num_words, tl.num_programs(1) * TILE):
        position = start + tl.arange(0, TILE)
        row = (position // row_words).to(tl.int64)[:, None]
        at = (position % row_words).to(tl.int64)[:, None] * 8 + units[None, :] * UNIT
        inside = (position < num_words)[:, None] & (at < row_bytes)
        there = destination + row * destination_stride + at
        data = _copy_unit(source + row * source_stride + at, there, inside, UNIT, COPY)
        if CHECKSUM:
            word = tl.sum(data << (units * (8 * UNIT)).to(tl.uint64)[None, :], axis=1)
            x = word + (position + 1).to(tl.uint64) * GOLDEN_RATIO
            x = (x ^ (x >> 30)) * FACTOR_1
            x = (x ^ (x >> 27)) * FACTOR_2
            total += tl.where(position < num_words, x ^ (x >> 31), 0)
    if CHECKSUM:
        tl.atomic_add(checksums + box, tl.sum(total, axis=0).to(tl.int64))
