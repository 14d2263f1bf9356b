"""Which elements of a tensor have been written: disjoint boxes, found by their rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from megarl.reshard.layout.layout import Box, intersect, volume


class Coverage:
    """Disjoint boxes of one tensor; thousands of them cost little, as experts stacked in one parameter bring them."""

    def __init__(self) -> None:
        self.num_elements = 0
        """In the boxes together."""
        self._boxes: list[Box] = []
        """Sorted, hence by first row."""
        self._tallest = 0

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes)

    def meeting(self, box: Box) -> list[Box]:
        """Those that share an element with `box`."""
        if not box:
            return list(self._boxes)
        first, last = box[0]
        at = bisect_left(self._boxes, ((first - self._tallest + 1, 0),))
        found = []
        while at < len(self._boxes) and self._boxes[at][0][0] < last:
            if intersect(self._boxes[at], box) is not None:
                found.append(self._boxes[at])
            at += 1
        return found

    def add(self, box: Box) -> None:
        """Take in a box that meets none of the others."""
        insort(self._boxes, box)
        self.num_elements += volume(box)
        if box:
            self._tallest = max(self._tallest, box[0][1] - box[0][0])

    def remove(self, box: Box) -> None:
        """Forget one of the boxes."""
        del self._boxes[bisect_left(self._boxes, box)]
        self.num_elements -= volume(box)

    def missing(self, box: Box) -> Box | None:
        """A part of `box` that no box covers, the first by rows; None where all of it is covered."""
        left = subtract(box, self.meeting(box))
        return min(left) if left else None


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """What `others` leave of `box`, as disjoint boxes."""
    left = [box]
    for other in others:
        left = [part for piece in left for part in _without(piece, other)]
    return left


def _without(box: Box, other: Box) -> Iterator[Box]:
    shared = intersect(box, other)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        # dimensions before `dim` are cut to what is shared, so that the parts are disjoint
        if start < first:
            yield (*shared[:dim], (start, first), *box[dim + 1 :])
        if last < stop:
            yield (*shared[:dim], (last, stop), *box[dim + 1 :])
