"""Samples of an engine's weights: a few small boxes, chosen by the policy version alone.

    engine needs     rows 256:512 of q_proj on TP rank 1   ---->   sample: rows 300:310
    trainer holds    rows 0:305 on rank 0, 305:512 on rank 1 --->  parts:  rows 300:305 and 305:310

A sample lies in one piece of the engine's layout. A trainer rank has the part of it that one of its own pieces holds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.reshard.layout.layout import Box, ShardPiece, WeightLayout, contains, intersect, volume

MAX_ELEMENTS = 2**18
"""Largest number of elements in a sample, unless one row has more: all samples of a sync are a few megabytes."""


@dataclass(frozen=True, slots=True)
class SampledBox:
    """A box of weights that one TP rank of every engine holds."""

    tp_rank: int
    tensor: str
    box: Box
    dtype: str
    """Torch's name of the dtype in which the engine holds the tensor."""


def sample_boxes(layouts: Sequence[WeightLayout], policy_version: int, count: int) -> list[SampledBox]:
    """Return `count` boxes of an engine's weights, or one of each piece if it has fewer pieces.

    Args:
        layouts: layout of the engine by TP rank.
        policy_version: the only other input of the choice: the same version gives the same boxes.
    """
    rng = random.Random(policy_version)
    sizes = [len(layout.pieces) for layout in layouts]
    chosen = sorted(rng.sample(range(sum(sizes)), min(count, sum(sizes))))
    samples, first, tp_rank = list[SampledBox](), 0, 0
    for number in chosen:
        while number - first >= sizes[tp_rank]:
            first, tp_rank = first + sizes[tp_rank], tp_rank + 1
        layout = layouts[tp_rank]
        piece = layout.pieces[number - first]
        samples.append(SampledBox(tp_rank, piece.tensor, _cut_rows(piece.box, rng), layout.tensors[piece.tensor].dtype))
    return samples


def find_parts(pieces: Sequence[ShardPiece], box: Box, tensor: str) -> Iterator[tuple[Box, str, Box]]:
    """Yield the parts of a box that pieces of a layout hold: (part, local tensor, the part's box in it)."""
    for piece in pieces:
        part = intersect(piece.box, box) if piece.tensor == tensor else None
        if part is not None:
            yield part, piece.local, _move(part, piece)


def find_copies(pieces: Sequence[ShardPiece], box: Box, tensor: str) -> Iterator[tuple[str, Box]]:
    """Yield (local tensor, box in it) for each piece that holds all of `box`; tied weights are held several times."""
    for piece in pieces:
        if piece.tensor == tensor and contains(piece.box, box):
            yield piece.local, _move(box, piece)


def _cut_rows(box: Box, rng: random.Random) -> Box:
    """Return a random range of rows of the box with at most `MAX_ELEMENTS` elements, but at least one row."""
    if volume(box) <= MAX_ELEMENTS:
        return box
    (start, stop), *others = box
    rows = max(1, MAX_ELEMENTS // volume(tuple(others)))
    first = rng.randrange(start, stop - rows + 1)
    return ((first, first + rows), *others)


def _move(box: Box, piece: ShardPiece) -> Box:
    """Return the box of the local tensor that has the elements of `box`, a part of the piece."""
    return tuple(
        (start - origin + local, stop - origin + local)
        for (start, stop), (origin, _), (local, _) in zip(box, piece.box, piece.local_box, strict=True)
    )
