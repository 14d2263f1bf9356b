"""Which bytes move from whom to whom: a pure function of layouts, the same on every rank, with no communication.

    source layouts (what each rank holds)  --.
                                              >-- moves: (source rank, destination rank, box), every missing byte once
    need layouts (what each rank serves)   --'

Shapes and units: boxes in elements, sizes in bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.errors import WeightSyncError
from megarl.reshard.bucket import torch_dtype
from megarl.reshard.layout import Box, Piece, TensorSpec, WeightLayout, intersect, volume


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one tensor, from where it lies to where it is needed."""

    source: int
    destination: int
    tensor: str
    box: Box
    source_local: str
    source_box: Box
    local: str
    local_box: Box
    dtype: str
    """As torch names it."""
    num_bytes: int

    @property
    def is_local(self) -> bool:
        """True where the rank needs what it holds."""
        return self.source == self.destination


@dataclass(frozen=True, slots=True)
class Topology:
    """Which machine each trainer rank is on."""

    nodes: tuple[int, ...]

    def same_node(self, a: int, b: int) -> bool:
        """True where two ranks share a machine."""
        return self.nodes[a] == self.nodes[b]

    @classmethod
    def single(cls, world: int) -> Topology:
        """All ranks on one machine."""
        return cls((0,) * world)


@dataclass(frozen=True, slots=True)
class Holding:
    """A box that some ranks hold, each in a local tensor of its own."""

    box: Box
    pieces: Mapping[int, Piece]
    """By rank."""


@dataclass(slots=True)
class _Load:
    """Bytes that each rank has been asked to send so far."""

    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def index_sources(sources: Sequence[WeightLayout]) -> dict[str, list[Holding]]:
    """Tensor -> its distinct boxes and who holds them."""
    by_box: dict[str, dict[Box, dict[int, Piece]]] = {}
    for rank, layout in enumerate(sources):
        for piece in layout.pieces:
            by_box.setdefault(piece.tensor, {}).setdefault(piece.box, {})[rank] = piece
    return {tensor: [Holding(box, held) for box, held in boxes.items()] for tensor, boxes in by_box.items()}


def plan_moves(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    *,
    groups: Sequence[Sequence[int]] = (),
) -> list[Move]:
    """Every element that a rank needs, from the best rank that holds it.

    Best: itself, then a member of its group, then its machine, then who has been asked for the fewest bytes so far.

    Args:
        needs: by destination rank.
        groups: ranks that prefer each other; micro-DP groups.

    Raises:
        WeightSyncError: no rank holds a needed element; names the tensor and the box.
    """
    held, load = index_sources(sources), _Load()
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    wanted = {rank: _by_tensor(needs[rank]) for rank in sorted(needs)}
    moves: list[Move] = []
    for tensor, spec in _tensors_of(needs).items():
        holdings = held.get(tensor, [])
        for rank, pieces in wanted.items():
            for piece in pieces.get(tensor, ()):
                moves.extend(_serve(rank, piece, holdings, spec, topology, group_of, load))
    return moves


def _serve(
    rank: int,
    need: Piece,
    holdings: Sequence[Holding],
    spec: TensorSpec,
    topology: Topology,
    group_of: Mapping[int, int],
    load: _Load,
) -> list[Move]:
    moves, missing = [], volume(need.box)
    for holding in holdings:
        box = intersect(holding.box, need.box)
        if box is None:
            continue
        source = _choose(rank, holding, topology, group_of, load)
        piece = holding.pieces[source]
        move = Move(
            source=source,
            destination=rank,
            tensor=need.tensor,
            box=box,
            source_local=piece.local,
            source_box=_shift(box, piece),
            local=need.local,
            local_box=_shift(box, need),
            dtype=spec.dtype,
            num_bytes=volume(box) * torch_dtype(spec.dtype).itemsize,
        )
        if not move.is_local:
            load.sent[source] += move.num_bytes
        moves.append(move)
        missing -= volume(box)
    if missing:
        raise WeightSyncError(
            f"{need.tensor}: rank {rank} needs {need.box}, of which no trainer rank holds {missing} elements"
        )
    return moves


def _choose(rank: int, holding: Holding, topology: Topology, group_of: Mapping[int, int], load: _Load) -> int:
    if rank in holding.pieces:
        return rank
    mine = group_of.get(rank)

    def order(source: int) -> tuple[bool, bool, int, int]:
        outside = mine is None or group_of.get(source) != mine
        return outside, not topology.same_node(rank, source), load.sent[source], source

    return min(holding.pieces, key=order)


def _shift(box: Box, piece: Piece) -> Box:
    """`box`, given in the tensor's coordinates, in the coordinates of the piece's local tensor."""
    return tuple(
        (start - held[0] + local[0], stop - held[0] + local[0])
        for (start, stop), held, local in zip(box, piece.box, piece.local_box, strict=True)
    )


def _by_tensor(layout: WeightLayout) -> dict[str, list[Piece]]:
    out: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        out.setdefault(piece.tensor, []).append(piece)
    return out


def _tensors_of(needs: Mapping[int, WeightLayout]) -> dict[str, TensorSpec]:
    out: dict[str, TensorSpec] = {}
    for rank in sorted(needs):
        out.update(needs[rank].tensors)
    return out
