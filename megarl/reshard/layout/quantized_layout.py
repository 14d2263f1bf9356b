"""Layouts of weights that their holder converts before it sends them: quantized to FP8, or cast to another dtype.

A block of 128 x 128 has one scale:

    holds   q_proj.weight            bfloat16 [4096, 4096]  rows 1024:2048  in local tensor  linear_qkv.weight
    sends   q_proj.weight            e4m3     [4096, 4096]  rows 1024:2048                   linear_qkv.weight:fp8
            q_proj.weight_scale_inv  float32  [32, 32]      rows 8:16                        linear_qkv.weight:scales:0

A shard may cut blocks. Its holder then sends the scales of those blocks whose first element lies in the shard, so that
every scale has one holder among the shards of a weight.

Some tensors are sent in another dtype than their holder's: in a bfloat16 model SGLang holds biases of experts and the
`A_log` of gated delta nets in float32, and the norms of gated delta nets in bfloat16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megarl.errors import WeightSyncError
from megarl.model_files.quantization import BLOCK, SCALES_DTYPE, VALUES_DTYPE, scale_name, scale_shape
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout, merge_specs, once_each


@dataclass(frozen=True, slots=True)
class QuantizedPiece:
    """A shard piece that is quantized."""

    source: ShardPiece
    """Where its holder has it, unquantized."""
    values: str
    """Local tensor of its FP8 values, of the shape of the unquantized one."""
    scales: str
    """Local tensor of the scales that the holder sends."""
    scale_box: Box
    """Which scales of the weight these are; may be empty."""

    @property
    def touched_blocks(self) -> Box:
        """The box of all blocks that the piece has elements of."""
        return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in self.source.box)

    def cuts_blocks(self, shape: tuple[int, ...]) -> bool:
        """Return whether the piece has a part of a block only, of a weight of `shape`."""
        edges = zip(self.source.box, shape, strict=True)
        return any(start % BLOCK or (stop % BLOCK and stop != n) for (start, stop), n in edges)


def quantized_tensors(needs: Iterable[WeightLayout]) -> frozenset[str]:
    """Return the weights that receivers with these layouts need in FP8, with their scales.

    Raises:
        WeightSyncError: one has no scales of the shape that blocks of 128 x 128 have.
    """
    found: set[str] = set()
    tensors = merge_specs(needs)
    for name, spec in tensors.items():
        if spec.dtype != VALUES_DTYPE:
            continue
        scales = tensors.get(scale_name(name))
        if scales is None or len(spec.shape) != 2 or scales != TensorSpec(scale_shape(spec.shape), SCALES_DTYPE):
            got = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise WeightSyncError(
                f"{name}: the engines hold {VALUES_DTYPE} {list(spec.shape)}, which a sync can send with a "
                f"{SCALES_DTYPE} scale for each block of {BLOCK} x {BLOCK} only, they have as scales: {got}"
            )
        found.add(name)
    return frozenset(found)


def find_quantized_pieces(layout: WeightLayout, names: Collection[str]) -> list[QuantizedPiece]:
    """Return the pieces of the weights `names` in the layout of what a process holds, unquantized."""
    numbers: dict[str, int] = defaultdict(int)
    found = []
    for piece in layout.pieces:
        if piece.tensor not in names:
            continue
        number = numbers[piece.local]
        numbers[piece.local] += 1
        blocks = tuple((-(-start // BLOCK), -(-stop // BLOCK)) for start, stop in piece.box)
        found.append(QuantizedPiece(piece, f"{piece.local}:fp8", f"{piece.local}:scales:{number}", blocks))
    return found


def quantize_layout(layout: WeightLayout, names: Collection[str]) -> WeightLayout:
    """Return the layout of what a process sends that holds `layout` and quantizes the weights `names`."""
    if not names:
        return layout
    quantized = {piece.source: piece for piece in find_quantized_pieces(layout, names)}
    pieces: list[ShardPiece] = []
    for piece in layout.pieces:
        found = quantized.get(piece)
        if found is None:
            pieces.append(piece)
            continue
        pieces.append(ShardPiece(piece.tensor, piece.box, found.values, piece.local_box))
        if all(start < stop for start, stop in found.scale_box):
            box = tuple((0, stop - start) for start, stop in found.scale_box)
            pieces.append(ShardPiece(scale_name(piece.tensor), found.scale_box, found.scales, box))
    return WeightLayout(quantize_specs(layout.tensors, names), pieces)


def cast_dtypes(held: Mapping[str, TensorSpec], needs: Iterable[WeightLayout]) -> dict[str, str]:
    """Return the dtypes of the tensors that are cast before they are sent, because receivers hold them in another.

    There are none if receivers have no tensor of lower precision in the dtype of its holder: then all dtypes differ,
    which is a mistake.
    """
    found, is_alike = {}, False
    tensors = merge_specs(needs)
    for name in tensors.keys() & held.keys():
        dtype, of_holder = tensors[name].dtype, held[name].dtype
        is_alike |= dtype == of_holder != "float32"
        if dtype != of_holder and {dtype, of_holder} == {"float32", "bfloat16"}:
            found[name] = dtype
    return found if is_alike else {}


def cast_layout(layout: WeightLayout, dtypes: Mapping[str, str]) -> WeightLayout:
    """Return the layout with the tensors in `dtypes` in these dtypes."""
    if not dtypes:
        return layout
    specs = {name: TensorSpec(spec.shape, dtypes.get(name, spec.dtype)) for name, spec in layout.tensors.items()}
    return WeightLayout(specs, layout.pieces)


def convert_sources(sources: Sequence[WeightLayout], needs: Sequence[WeightLayout]) -> list[WeightLayout]:
    """Return the layouts of what the holders of `sources` send to receivers that need `needs`.

    Raises:
        WeightSyncError: as `quantized_tensors`.
    """
    names, dtypes = quantized_tensors(needs), cast_dtypes(sources[0].tensors, needs)
    if not names and not dtypes:
        return list(sources)
    sent = once_each(lambda layout: quantize_layout(cast_layout(layout, dtypes), names), sources)
    return once_each(lambda layout: WeightLayout(sent[0].tensors, layout.pieces), sent)


def quantize_specs(tensors: Mapping[str, TensorSpec], names: Collection[str]) -> dict[str, TensorSpec]:
    """Return the specs with the weights `names` in FP8, each followed by its scales."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        if name not in names:
            specs[name] = spec
            continue
        specs[name] = TensorSpec(spec.shape, VALUES_DTYPE)
        specs[scale_name(name)] = TensorSpec(scale_shape(spec.shape), SCALES_DTYPE)
    return specs
