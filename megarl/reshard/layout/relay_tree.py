"""Broadcast trees over machines: a box reaches many machines, and no rank sends it to more than a few.

The machines form a ring, which each box enters at another place (its rotation). The ring is cut into one arc per root,
a rank that holds the box. Machine b of an arc receives the box from machine b without its highest bit:

    root -> 0        0 -> 1, 2, 4        1 -> 3, 5        2 -> 6        3 -> 7

A machine that already holds the box receives nothing, and is the source for the machines after it. So a root sends a
box at most once per arc, a box passes at most log2(arc) machines, and whatever the rotation, a machine exchanges
messages only with machines whose distance on the ring is a power of two. With many rotations, all machines send equally
much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.reshard.layout.boxes import Ints

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RemoteSources:
    """Limits on the number of ranks of other machines that a rank receives from and sends to."""

    num_turns: int | None = None
    """Number of different turns of boxes with the same holders; None: no limit."""
    single_root: frozenset[Ranks] = frozenset()
    """Sets of ranks that receive a box from only one of its holders on other machines."""

    def tree(self, holders: Ranks, receivers: Ranks, machines: int, origins: Iterable[int] = ()) -> RelayTree:
        """Return the trees by which `receivers` on `machines` machines get a box."""
        return RelayTree.over(machines, 1 if receivers in self.single_root else len(holders), origins)


UNLIMITED = RemoteSources()


@dataclass(frozen=True, slots=True)
class Entry:
    """Where boxes of the same holders and receivers enter the ring of machines, in turn 0; each turn adds 1."""

    root: int
    """Position of the first root among the holders, modulo their number."""
    rotation: int
    fetcher: int
    """Position of the rank that fetches the box among those of its machine, modulo their number."""


@dataclass(frozen=True, slots=True)
class Path:
    """How N boxes reach a machine: arrays [N]."""

    root: Ints
    """Index of the root of the arc that the machine is in."""
    parent: Ints
    """The machine that passes each box on to it, -1: a root does, or the machine holds the box."""
    origin: Ints
    """The machine that holds the box and that it comes from, -1: it comes from a root."""
    passed: Ints
    """Number of machines that pass the box on before."""


@dataclass(frozen=True)
class RelayTree:
    """The trees over a ring of machines."""

    machines: int
    arc: int
    """Number of machines that one root serves."""
    origins: frozenset[int] = frozenset()
    """Machines that hold the box."""

    @classmethod
    def over(cls, machines: int, roots: int, origins: Iterable[int] = ()) -> RelayTree:
        """Return trees over `machines` machines with at most `roots` roots."""
        return cls(machines, max(-(-machines // roots), 1), frozenset(origins))

    @property
    def num_roots(self) -> int:
        """Number of roots that serve an arc."""
        return -(-self.machines // self.arc)

    @property
    def depth(self) -> int:
        """The most machines that pass a box on before it arrives."""
        return int(np.bitwise_count(np.arange(self.arc)).max())

    def path(self, machine: int, rotation: Ints) -> Path:
        """Return the paths by which N boxes reach a machine.

        Args:
            rotation: [N].
        """
        arc, place = np.divmod((machine + rotation) % self.machines, self.arc)
        parent, origin = np.full(len(place), -1, np.int64), np.full(len(place), -1, np.int64)
        passed = np.zeros(len(place), np.int64)
        if machine in self.origins:
            return Path(arc, parent, np.full_like(parent, machine), passed)
        while place.any():
            above = place - _highest_bit(place)
            other = (arc * self.arc + above - rotation) % self.machines
            passes = place > 0
            parent = np.where(passes & (parent < 0), other, parent)
            passed += passes
            is_origin = passes & self._is_origin[other]
            origin = np.where(is_origin, other, origin)
            place = np.where(is_origin, 0, above)
        return Path(arc, parent, origin, passed)

    def children(self, machine: int, rotation: Ints) -> list[tuple[Ints, int]]:
        """Return which machines `machine` passes N boxes on to, as (indices of boxes, machine).

        Args:
            rotation: [N].
        """
        at = (machine + rotation) % self.machines
        place = at % self.arc
        end = np.minimum(at - place + self.arc, self.machines)
        found, distance = [], 1
        while distance < self.arc:
            boxes = np.flatnonzero((distance > place) & (at + distance < end))
            number = (machine + distance) % self.machines
            if len(boxes) and number not in self.origins:
                found.append((boxes, number))
            distance *= 2
        return found

    def entries(self, root: Ints, rotation: Ints) -> Ints:
        """Return the machine [N] that each box enters at from a root, -1 where it does not need that root.

        Args:
            root: [N], index of the root.
            rotation: [N].
        """
        machine: Ints = (root * self.arc - rotation) % self.machines
        return np.where((root < self.num_roots) & ~self._is_origin[machine], machine, -1)

    @cached_property
    def _is_origin(self) -> Ints:
        """By machine, whether it holds the box."""
        is_origin = np.zeros(self.machines, bool)
        is_origin[list(self.origins)] = True
        return is_origin


def _highest_bit(values: Ints) -> Ints:
    """Return the highest bit of each value, 0 for 0."""
    bits: Ints = np.where(values > 0, 1 << np.maximum(np.frexp(values)[1] - 1, 0), 0)
    return bits
