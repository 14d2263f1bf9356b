"""Codes of the elements of a box that have changed, with which a receiver completes the content that it holds.

    changed elements  kind     the code's bytes                                       bfloat16, n = 65,536
    none              none     nothing
    few               places   n > 65,536: uint32 [blocks], changes by block          4 B a change
                               uint16 [changed], their places in its block
                               [changed], their values
    up to a half      bitmap   uint8 [ceil(n / 8)], one bit an element                8 KiB + 2 B a change
                               [changed], their values
    more              whole    the box as it is                                       128 KiB

Elements are those of the box in row-major order, compared bit by bit, so that -0.0 differs from 0.0 and a NaN equals
itself. Kind and size follow from the number of changed elements, which both ends know before: messages need no header.
Except for `whole`, a code takes at most half of its box's bytes, which bounds the memory of all codes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Ints
from megarl.reshard.transfer.bucket import contiguous_bytes

BLOCK = 1 << 16
"""Elements in a block: places in it fit into 16 bits."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the dtype to compare and copy elements as."""


@dataclass(frozen=True, slots=True)
class CodeForm:
    """Kind and size of a code."""

    kind: str
    """`none`, `places`, `bitmap` or `whole`."""
    num_bytes: int


@lru_cache(1 << 16)
def code_form(elements: int, itemsize: int, changed: int) -> CodeForm:
    """Return the form of the code for `changed` of `elements` elements of `itemsize` bytes.

    >>> code_form(1 << 16, 2, 655)
    CodeForm(kind='places', num_bytes=2620)
    """
    if not changed:
        return CodeForm("none", 0)
    blocks = -(-elements // BLOCK)
    places = (4 * blocks if blocks > 1 else 0) + changed * (2 + itemsize)
    bitmap = -(-elements // 8) + changed * itemsize
    kind, num_bytes = ("places", places) if places <= bitmap else ("bitmap", bitmap)
    whole = elements * itemsize
    return CodeForm(kind, num_bytes) if 2 * num_bytes <= whole else CodeForm("whole", whole)


def as_integers(tensor: Tensor) -> Tensor:
    """Return a view of the elements as integers of the same size."""
    return tensor.view(_INTEGERS[tensor.itemsize])


def encode(box: Tensor, base: Tensor) -> tuple[int, Tensor | None]:
    """Return how many elements of a box differ from the base, and their code; update the base.

    Args:
        box: of any shape and strides.
        base: [elements of the box], integers of the same size: the content that receivers hold.

    Returns:
        The number of changed elements, and uint8 [bytes of the code] on the device of the base; None if the code is
        the box itself, or nothing.
    """
    now, before = as_integers(box), base.view(box.shape).to(box.device, non_blocking=True)
    places = (now != before).flatten().nonzero().squeeze(1)
    changed = len(places)
    form = code_form(base.numel(), base.itemsize, changed)
    if form.kind == "none":
        return 0, None
    if form.kind == "whole":
        base.view(box.shape).copy_(now)
        return changed, None
    values = now.flatten()[places].to(base.device)
    places = places.to(base.device)
    base[places] = values
    header = _bitmap(places, base.numel()) if form.kind == "bitmap" else _places(places, base.numel())
    return changed, torch.cat([header, values.view(torch.uint8)])


def decode(code: Tensor, changed: int, target: Tensor) -> None:
    """Write the changed elements into the target; inverse of `encode`.

    Args:
        code: uint8 [bytes of the code], contiguous, at any address.
        changed: number of changed elements.
        target: the box as the receiver holds it, of any strides.
    """
    form = code_form(target.numel(), target.itemsize, changed)
    if form.kind == "none":
        return
    cells = as_integers(target)
    if form.kind == "whole":
        cells.copy_(_aligned(code, cells.dtype).view(cells.shape))
        return
    header = code[: form.num_bytes - changed * target.itemsize]
    values = _aligned(code[header.numel() :], cells.dtype)
    places = _find_bits(header) if form.kind == "bitmap" else _find_places(header, changed, target.numel())
    if cells.is_contiguous():
        cells.view(-1)[places] = values
    else:
        cells[torch.unravel_index(places, cells.shape)] = values


def decode_boxes(bucket: Tensor, lines: Ints, boxes: Sequence[Tensor]) -> None:
    """Decode codes from a bucket, each into the box as the receiver holds it.

    Args:
        bucket: uint8 [bytes].
        lines: int64 [n, 3], `megarl.reshard.planning.delta.CodedRound.lines`, one for each of `boxes`.
    """
    for (slot, changed, offset), box in zip(lines.tolist(), boxes, strict=True):
        end = offset + code_form(box.numel(), box.itemsize, changed).num_bytes
        if end > bucket.numel():
            raise WeightSyncError(f"the code of box {slot} ends at byte {end}, the bucket at {bucket.numel()}")
        decode(bucket[offset:end], changed, box)


def whole_bytes(box: Tensor) -> Tensor:
    """Return the bytes of a box, uint8 [bytes], a view if its elements are contiguous."""
    found = contiguous_bytes(box)
    return (contiguous_bytes(box.contiguous()) if found is None else found).view(-1)  # type: ignore[union-attr]


def _places(places: Tensor, elements: int) -> Tensor:
    """Return the bytes of block counts and of places; `places`: int64 [changed], ascending."""
    in_block = (places % BLOCK).to(torch.int32).to(torch.uint16).view(torch.uint8)
    if elements <= BLOCK:
        return in_block
    counts = torch.bincount(places // BLOCK, minlength=-(-elements // BLOCK)).to(torch.int32)
    return torch.cat([counts.view(torch.uint8), in_block])


def _find_places(header: Tensor, changed: int, elements: int) -> Tensor:
    """Return int64 [changed], inverse of `_places`."""
    first_place = header.numel() - 2 * changed
    counts, places = header[:first_place], _aligned(header[first_place:], torch.uint16).to(torch.int64)
    if elements > BLOCK:
        of_block = _aligned(counts, torch.int32).to(torch.int64)
        first = torch.arange(len(of_block), device=header.device) * BLOCK
        places += first.repeat_interleave(of_block, output_size=changed)
    return places


def _bitmap(places: Tensor, elements: int) -> Tensor:
    bits = torch.zeros(-(-elements // 8) * 8, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=places.device)
    return (bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def _find_bits(bitmap: Tensor) -> Tensor:
    """Return the places of the bits that are set, int64, ascending."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap.unsqueeze(1) >> shifts) & 1).flatten().nonzero().squeeze(1)


def _aligned(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes as elements of `dtype`, a view if their address allows."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)
