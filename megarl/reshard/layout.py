"""The one language for where weights lie: boxes in Hugging Face coordinates.

    Hugging Face tensor  model.layers.0.self_attn.q_proj.weight   [512, 128]
    a rank's piece       rows 256:512, all columns                 Box ((256, 512), (0, 128))
    lies in              decoder.layers.0.self_attention.linear_qkv.weight   at Box ((0, 256), (0, 128))

Whoever holds weights describes them this way; whoever moves weights needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One Hugging Face tensor of the model."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it: `float32`."""

    @property
    def box(self) -> Box:
        """The whole tensor."""
        return tuple((0, n) for n in self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a Hugging Face tensor, and the same elements in a local tensor."""

    tensor: str
    box: Box
    local: str
    local_box: Box


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """What one process holds of a model."""

    tensors: Mapping[str, TensorSpec]
    """Every Hugging Face tensor of the model, also those that this process holds nothing of; ordered."""

    pieces: tuple[Piece, ...]

    def __hash__(self) -> int:
        """Of the pieces alone: layouts of one model differ in them."""
        return hash(self.pieces)

    def __post_init__(self) -> None:
        for piece in self.pieces:
            assert extent(piece.box) == extent(piece.local_box), piece
            assert contains(self.tensors[piece.tensor].box, piece.box), piece


def extent(box: Box) -> tuple[int, ...]:
    """Length per dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements."""
    n = 1
    for start, stop in box:
        n *= max(0, stop - start)
    return n


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both, or None."""
    box = tuple((max(s, u), min(t, v)) for (s, t), (u, v) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def contains(outer: Box, inner: Box) -> bool:
    """True where every element of `inner` is in `outer`."""
    return all(s <= u and v <= t for (s, t), (u, v) in zip(outer, inner, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Indexes a tensor with the box."""
    return tuple(slice(start, stop) for start, stop in box)
