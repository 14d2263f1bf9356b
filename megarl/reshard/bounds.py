"""The least that has to move, whatever the method: what a rank or a machine needs and does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.reshard.bucket import torch_dtype
from megarl.reshard.layout import Box, WeightLayout, intersect, volume
from megarl.reshard.plan import Topology


def missing_bytes(held: Sequence[WeightLayout], needed: Sequence[WeightLayout]) -> int:
    """Bytes of the union of `needed` that the union of `held` lacks."""
    have, want = _boxes(held), _boxes(needed)
    tensors = {name: spec for layout in needed for name, spec in layout.tensors.items()}
    total = 0
    for tensor, boxes in want.items():
        size = torch_dtype(tensors[tensor].dtype).itemsize
        total += size * sum(volume(box) for box in _difference(_disjoint(boxes), have.get(tensor, [])))
    return total


def rank_bounds(sources: Sequence[WeightLayout], needs: Mapping[int, WeightLayout]) -> dict[int, int]:
    """By rank, the bytes that it has to receive."""
    alike: dict[tuple[int, int], int] = {}  # replicas share their layouts: pairs are few where ranks are many
    for rank, need in needs.items():
        pair = id(sources[rank]), id(need)
        if pair not in alike:
            alike[pair] = missing_bytes([sources[rank]], [need])
    return {rank: alike[id(sources[rank]), id(need)] for rank, need in needs.items()}


def node_bounds(
    sources: Sequence[WeightLayout], needs: Mapping[int, WeightLayout], topology: Topology
) -> dict[int, int]:
    """By machine, the bytes that have to enter it."""
    bounds = {}
    for node in sorted(set(topology.nodes)):
        ranks = [rank for rank, n in enumerate(topology.nodes) if n == node]
        wanted = [needs[rank] for rank in ranks if rank in needs]
        bounds[node] = missing_bytes([sources[rank] for rank in ranks], wanted)
    return bounds


def _boxes(layouts: Sequence[WeightLayout]) -> dict[str, list[Box]]:
    out: dict[str, list[Box]] = {}
    for layout in layouts:
        for piece in layout.pieces:
            out.setdefault(piece.tensor, []).append(piece.box)
    return out


def _disjoint(boxes: Sequence[Box]) -> list[Box]:
    """The same elements, each in one box."""
    out: list[Box] = []
    for box in dict.fromkeys(boxes):
        out.extend(_difference([box], out))
    return out


def _difference(boxes: Sequence[Box], taken: Sequence[Box]) -> list[Box]:
    """What of `boxes` is in none of `taken`."""
    rest = list(boxes)
    for hole in dict.fromkeys(taken):
        rest = [part for box in rest for part in subtract(box, hole)]
    return rest


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, as disjoint boxes."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    parts: list[Box] = []
    rest = list(box)
    for dim, ((start, stop), (lo, hi)) in enumerate(zip(box, common, strict=True)):
        if start < lo:
            parts.append((*rest[:dim], (start, lo), *rest[dim + 1 :]))
        if hi < stop:
            parts.append((*rest[:dim], (hi, stop), *rest[dim + 1 :]))
        rest[dim] = (lo, hi)
    return parts
