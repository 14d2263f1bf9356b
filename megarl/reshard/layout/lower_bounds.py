"""Lower bounds of a sync for any method: bytes that a rank or a node needs and does not hold, and seconds they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from megarl.model_files.header import itemsize
from megarl.reshard.layout.layout import Box, Ints, PieceTable, WeightLayout, hash_rows, merge_specs, widen
from megarl.reshard.layout.model_tensors import Names, numbers_among
from megarl.reshard.layout.topology import LinkRates, Topology

Layouts = Sequence[WeightLayout]


@dataclass(frozen=True, slots=True)
class MissingBytes:
    """Bytes that a set of ranks needs and does not hold."""

    elements: int
    """Bytes with each element counted once: the lower bound."""
    boxes: int
    """Bytes with each box counted once: what a plan transfers; more than `elements` if needed boxes overlap in part."""
    uneven: bool
    """Whether ranks need the same box unequally often: the one that relays it then decides how often it is sent."""


def rank_bounds(sources: Layouts, needs: Mapping[int, WeightLayout]) -> dict[int, int]:
    """Return, by rank, the bytes that it has to receive."""
    need_index = NeedIndex(needs.values())
    return {rank: need_index.missing([sources[rank]], [need]).elements for rank, need in needs.items()}


def node_bounds(sources: Layouts, needs: Mapping[int, WeightLayout], topology: Topology) -> dict[int, int]:
    """Return, by node, the bytes that have to enter it."""
    need_index = NeedIndex(needs.values())
    return {node: missing.elements for node, missing in missing_by_node(need_index, sources, needs, topology).items()}


def missing_by_node(
    need_index: NeedIndex, sources: Layouts, needs: Mapping[int, WeightLayout], topology: Topology
) -> dict[int, MissingBytes]:
    """Return, by node, the bytes that its ranks together need and do not hold."""
    return {
        node: need_index.missing([sources[rank] for rank in ranks], [needs[rank] for rank in ranks if rank in needs])
        for node, ranks in topology.ranks_of.items()
    }


def seconds_bound(sources: Layouts, needs: Mapping[int, WeightLayout], topology: Topology, rates: LinkRates) -> float:
    """Return the least seconds that a sync takes with any method that sends nothing over the network within a node.

    It follows from the layouts alone, as the largest of these, for each node and each rank:

        bytes that the node needs and does not hold     / rate of its NICs
        bytes of other nodes' needs that it alone holds / rate of its NICs
        bytes that the rank needs and does not hold     / rate of NVLink and its NICs together
        those of them that its node holds               / rate of NVLink
    """
    need_index = NeedIndex(needs.values())
    ranks_of, entering = topology.ranks_of, missing_by_node(need_index, sources, needs, topology)
    seconds: list[float] = []
    for node, ranks in ranks_of.items():
        held, link_rate = [sources[rank] for rank in ranks], rates.nvlink + rates.rank_network(len(ranks))
        for rank in needs.keys() & set(ranks):
            missing = need_index.missing([sources[rank]], [needs[rank]]).elements
            on_node = missing - need_index.missing(held, [needs[rank]]).elements
            seconds.append(max(missing / link_rate, on_node / rates.nvlink))
        others = [rank for rank, at in enumerate(topology.nodes) if at != node]
        leaving, held_by_others = 0, {id(sources[rank]) for rank in others}
        if any(id(sources[rank]) not in held_by_others for rank in ranks):
            of_others = [needs[rank] for rank in others if rank in needs]
            leaving = need_index.missing([sources[rank] for rank in others], of_others).elements
        seconds.append(max(entering[node].elements, leaving) / (rates.network * rates.num_nics(len(ranks))))
    return max(seconds, default=0.0)


class NeedIndex:
    """Index over the needed layouts of many ranks that counts the bytes that other layouts do not cover.

    Tensors of which the same boxes are needed, as for most tensors of a model, form one kind. Boxes are compared once
    per kind and set of held boxes: DeepSeek-V3 has 46,000 tensors and a few dozen kinds.
    """

    def __init__(self, needs: Iterable[WeightLayout]) -> None:
        layouts = _distinct(needs)
        self._known = layouts
        """References that keep the ids of layouts, which serve as keys, valid."""
        specs = merge_specs(layouts)
        self._names = Names(specs)
        sizes = np.array([itemsize(spec.dtype) for spec in specs.values()], np.int64)
        tables = [layout.pieces for layout in layouts]
        self._width = max((table.columns.width for table in tables), default=1)
        needed = [self._rows(table) for table in tables]
        mark = np.zeros(len(sizes), np.uint64)
        for number, (tensor, boxes) in enumerate(needed):
            np.add.at(mark, tensor, _marks(boxes, np.full(len(tensor), number)))
        kinds = np.unique(hash_rows([mark, sizes]), return_index=True, return_inverse=True, return_counts=True)
        _, first, kind, count = kinds
        self._kind = kind.reshape(-1)
        self._size, self._count = sizes[first].tolist(), count.tolist()
        is_first = np.zeros(len(sizes), bool)
        is_first[first] = True
        self._needed = {
            id(layout): _by_key(self._kind[tensor], boxes, is_first[tensor])
            for layout, (tensor, boxes) in zip(layouts, needed, strict=True)
        }
        self._held: dict[tuple[int, ...], dict[int, list[tuple[int, tuple[Box, ...]]]]] = {}
        self._unions: dict[tuple[int, ...], tuple[dict[int, tuple[Box, ...]], MissingBytes]] = {}
        self._missing: dict[tuple[tuple[int, ...], tuple[int, ...]], MissingBytes] = {}

    def missing(self, held: Layouts, needed: Layouts) -> MissingBytes:
        """Count what is in `needed`, layouts that the index was built from, and in none of `held`."""
        held, needed = _distinct(held), _distinct(needed)
        key = tuple(sorted(map(id, held))), tuple(sorted(map(id, needed)))
        if key in self._missing:
            return self._missing[key]
        of_held, of_needed = key
        if of_held not in self._held:
            self._known += held
            self._held[of_held] = self._read_held(held)
        if of_needed not in self._unions:
            self._unions[of_needed] = self._merge_needs(needed)
        union, all_needed = self._unions[of_needed]
        elements, boxes = all_needed.elements, all_needed.boxes
        for kind in self._held[of_held].keys() & union.keys():
            needs = _missing_elements(union[kind], ())
            for num_tensors, parts in self._held[of_held][kind]:
                lacks = _missing_elements(union[kind], parts)
                elements -= num_tensors * self._size[kind] * (needs[0] - lacks[0])
                boxes -= num_tensors * self._size[kind] * (needs[1] - lacks[1])
        self._missing[key] = MissingBytes(elements, boxes, all_needed.uneven)
        return self._missing[key]

    def _merge_needs(self, needed: Layouts) -> tuple[dict[int, tuple[Box, ...]], MissingBytes]:
        """Return, by kind, the union of the needed boxes, and what is missing if none of it is held.

        The union has a box as often as the layout that has it most often.
        """
        counts: dict[int, Counter[Box]] = {}
        uneven = False
        for layout in needed:
            for kind, boxes in self._needed[id(layout)].items():
                own, before = Counter(boxes), counts.setdefault(kind, Counter())
                uneven = uneven or any(before[box] not in (0, count) for box, count in own.items())
                counts[kind] = before | own
        union = {kind: tuple(boxes.elements()) for kind, boxes in counts.items()}
        elements = in_boxes = 0
        for kind, of_kind in union.items():
            each, each_in_boxes = _missing_elements(of_kind, ())
            elements += self._count[kind] * self._size[kind] * each
            in_boxes += self._count[kind] * self._size[kind] * each_in_boxes
        return union, MissingBytes(elements, in_boxes, uneven)

    def _read_held(self, held: Layouts) -> dict[int, list[tuple[int, tuple[Box, ...]]]]:
        """Return, by kind, (number of tensors, held boxes) for tensors of which any box is held."""
        rows = [self._rows(layout.pieces) for layout in held]
        if not rows:
            return {}
        tensor, boxes = (np.concatenate(column) for column in zip(*rows, strict=True))
        _, once = np.unique(_marks(boxes, tensor), return_index=True)
        tensor, boxes = tensor[once], boxes[once]
        tensors, place = np.unique(tensor, return_inverse=True)
        mark = np.zeros(len(tensors), np.uint64)
        np.add.at(mark, place.reshape(-1), _marks(boxes, np.zeros_like(tensor)))
        _, first, count = np.unique(hash_rows([mark, self._kind[tensors]]), return_index=True, return_counts=True)
        of_first = _by_key(tensor, boxes, np.isin(tensor, tensors[first]))
        found: dict[int, list[tuple[int, tuple[Box, ...]]]] = {}
        for number, num_tensors in zip(tensors[first].tolist(), count.tolist(), strict=True):
            found.setdefault(int(self._kind[number]), []).append((num_tensors, of_first[number]))
        return found

    def _rows(self, table: PieceTable) -> tuple[Ints, Ints]:
        """Return tensor indices [N] and boxes [N, D, 2] of the table's pieces, without tensors of other models."""
        tensor = numbers_among(table.tensors, self._names)[table.columns.tensor]
        some = np.flatnonzero(tensor >= 0)
        return tensor[some], widen(table.columns.boxes[some, : self._width], self._width)


def _marks(boxes: Ints, salt: Ints) -> Ints:
    return hash_rows([salt, *(boxes[:, dim, end] for dim in range(boxes.shape[1]) for end in (0, 1))])


def _by_key(keys: Ints, boxes: Ints, rows: Ints) -> dict[int, tuple[Box, ...]]:
    """Return, by key, the sorted boxes of the selected rows."""
    found: dict[int, list[Box]] = {}
    for key, box in zip(keys[rows].tolist(), boxes[rows].tolist(), strict=True):
        found.setdefault(key, []).append(tuple((start, stop) for start, stop in box))
    return {key: tuple(sorted(of_key)) for key, of_key in found.items()}


def _distinct(layouts: Iterable[WeightLayout]) -> list[WeightLayout]:
    """Return each layout object once: replicas share theirs."""
    return list({id(layout): layout for layout in layouts}.values())


@lru_cache(maxsize=1 << 16)
def _missing_elements(needed: tuple[Box, ...], held: tuple[Box, ...]) -> tuple[int, int]:
    """Count elements in none of `held`: of the union of `needed`, and summed over the boxes of `needed`.

    On the grid that the edges of all boxes span, each cell of which is all in a box or not at all.
    """
    boxes = np.array([*needed, *held])
    edges = [np.unique(ends) for ends in boxes.transpose(1, 0, 2)]
    cells = [tuple(slice(*np.searchsorted(*pair)) for pair in zip(edges, box, strict=True)) for box in boxes]
    size = reduce(np.multiply.outer, map(np.diff, edges))
    for of_box in cells[len(needed) :]:
        size[of_box] = 0
    is_needed, in_boxes = np.zeros(size.shape, bool), 0
    for of_box in cells[: len(needed)]:
        is_needed[of_box] = True
        in_boxes += int(size[of_box].sum())
    return int(size[is_needed].sum()), in_boxes
