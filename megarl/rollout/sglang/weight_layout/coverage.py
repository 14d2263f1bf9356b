"""Tracks which elements of a tensor have been written, as disjoint boxes sorted by rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from megarl.reshard.layout.layout import Box, intersect, volume


class Coverage:
    """A set of disjoint boxes of one tensor, efficient for thousands of boxes (experts stacked in one parameter)."""

    def __init__(self) -> None:
        self.num_elements = 0
        """Number of elements in all boxes."""
        self._boxes: list[Box] = []
        """Sorted boxes, hence sorted by first row."""
        self._max_rows = 0

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes)

    def overlapping(self, box: Box) -> list[Box]:
        """Return the boxes that share an element with `box`."""
        if not box:
            return list(self._boxes)
        first, last = box[0]
        at = bisect_left(self._boxes, ((first - self._max_rows + 1, 0),))
        found = []
        while at < len(self._boxes) and self._boxes[at][0][0] < last:
            if intersect(self._boxes[at], box) is not None:
                found.append(self._boxes[at])
            at += 1
        return found

    def add(self, box: Box) -> None:
        """Add a box that does not overlap the others."""
        insort(self._boxes, box)
        self.num_elements += volume(box)
        if box:
            self._max_rows = max(self._max_rows, box[0][1] - box[0][0])

    def remove(self, box: Box) -> None:
        """Remove one of the boxes."""
        del self._boxes[bisect_left(self._boxes, box)]
        self.num_elements -= volume(box)

    def first_gap(self, box: Box) -> Box | None:
        """Return the first part of `box`, by rows, that is not covered; None if all of it is covered."""
        left = subtract(box, self.overlapping(box))
        return min(left) if left else None


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return `box` without `others`, as disjoint boxes."""
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
        # dimensions before `dim` are cut to the shared range, so that the parts are disjoint
        if start < first:
            yield (*shared[:dim], (start, first), *box[dim + 1 :])
        if last < stop:
            yield (*shared[:dim], (last, stop), *box[dim + 1 :])
