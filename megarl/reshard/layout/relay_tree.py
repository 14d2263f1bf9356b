"""Broadcast trees over machines: a box reaches many machines, and no rank sends it to more than a few.

The machines form a ring, which each box enters at another place (its rotation). The ring is cut into one arc per root,
a rank that holds the box. Machine b of an arc receives the box from machine b without its highest digit of base 4:

    root -> 0        0 -> 1, 2, 3, 4, 8, 12        1 -> 5, 9, 13        2 -> 6, 10, 14        3 -> 7, 11, 15

A machine that already holds the box receives nothing, and is the source for the machines after it. So a root sends a
box at most once per arc, a box passes at most log4(arc) machines, and whatever the rotation, a machine exchanges
messages only with machines whose distance on the ring is one to three times a power of 4. With many rotations, all
machines send equally much.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megarl.reshard.layout.layout import Ints

Ranks = tuple[int, ...]

FAN_OUT = 4
"""Base of the digits of the trees: a larger one makes fewer hops, and more peers of each machine."""

POWERS = FAN_OUT ** np.arange(16)


@dataclass(frozen=True, slots=True)
class RemoteSources:
    """Limits on the number of ranks of other machines that a rank receives from and sends to."""

    num_turns: int | None = None
    """Number of different turns of boxes with the same holders; None: no limit."""
    arcs: tuple[int, int | None] = 1, None
    """The fewest and the most machines that one root serves, None: no limit. Within these, as many as it has to if each
    holder sends a box once."""
    even_origins: bool = False
    """Whether the machines that hold a box lie at equal distances on its ring. The rings of different boxes then have
    different orders, with more machines that exchange messages."""
    single_root: frozenset[Ranks] = frozenset()
    """Sets of ranks that receive a box from only one of its holders on other machines."""

    def arc_lengths(self, machines: Ints, roots: Ints) -> Ints:
        """Return how many machines one root serves, by numbers of machines [N] and of ranks that may be roots [N]."""
        arc: Ints = np.clip(-(-machines // roots), *self.arcs)
        return np.maximum(np.minimum(arc, machines), 1)


UNLIMITED = RemoteSources()


@dataclass(frozen=True, slots=True)
class Entry:
    """Where boxes of the same holders and receivers enter the ring of machines, in turn 0; each turn adds 1."""

    root: int = 0
    """Position of the first root among the holders, modulo their number."""
    rotation: int = 0
    fetcher: int = 0
    """Position of the rank that fetches the box among those of its machine, modulo their number."""


FIRST_ENTRY = Entry()


def turn_offset(num_turns: int | None, sources: Ints) -> Ints:
    """Return by how many turns the first sources of two receivers differ, so that all sources send equally much.

    Args:
        sources: [N], numbers of sources.
    """
    if num_turns is None:
        return np.ones_like(sources)
    found: Ints = np.where(num_turns % sources == 0, 1, num_turns)
    return found


@lru_cache
def first_sources(num_turns: int | None, sources: int) -> Ints:
    """Return the order [sources] in which receivers take sources in turn 0; each turn adds 1.

    Over all turns, and as far as possible over some consecutive ones, sources that so many receivers follow each other
    on send equally much: 0, 4, 2, 6, 1, 5, 3, 7 for 8 turns and sources, 0, 3, 1, 4, 2, 5 for 3 turns and 6 sources.
    """
    offset = int(turn_offset(num_turns, np.array(sources)))
    step = math.gcd(offset, sources)
    each = np.arange(sources // step)
    if offset == step:  # turns cover sources without overlap: spread the receivers, by the digits of their places
        each = _reversed_digits(len(each))
    order: Ints = (each * offset + np.arange(step)[:, None]).reshape(-1) % sources
    return order


def _reversed_digits(count: int) -> Ints:
    """Return the numbers below `count` in the order of their reversed digits, in the bases of its prime factors."""
    order, rest, base = np.zeros(1, np.int64), count, 2
    while rest > 1:
        if rest % base:
            base += 1
        else:
            rest //= base
            order = (np.arange(base)[:, None] * rest + order).reshape(-1)
    return order


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

    @property
    def num_roots(self) -> int:
        """Number of roots that serve an arc."""
        return -(-self.machines // self.arc)

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
            above = _without_highest_digit(place)
            other = (arc * self.arc + above - rotation) % self.machines
            passes = place > 0
            parent = np.where(passes & (parent < 0), other, parent)
            passed += passes
            is_origin = passes & self._is_origin[other]
            origin = np.where(is_origin, other, origin)
            place = np.where(is_origin, 0, above)
        return Path(arc, parent, origin, passed)

    def children(self, machine: int, rotation: Ints, among: Collection[int]) -> list[tuple[Ints, int]]:
        """Return which machines `machine` passes N boxes on to, as (indices of boxes, machine).

        Args:
            rotation: [N].
            among: machines to consider.
        """
        at = (machine + rotation) % self.machines
        place = at % self.arc
        end = np.minimum(at - place + self.arc, self.machines)
        found = []
        for distance in distances(self.arc):
            number = (machine + distance) % self.machines
            if number in among and number not in self.origins:
                boxes = np.flatnonzero((place < _power(distance)) & (at + distance < end))
                found += [(boxes, number)] if len(boxes) else []
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


@lru_cache
def ring_stride(machines: int, arc: int, num_origins: int, num_turns: int) -> int:
    """Return by how many places boxes enter a ring further on in each turn.

    In as many turns as possible, machines have other places: on the ring, in their arcs, and between the machines that
    hold the box, which lie at equal distances.
    """
    spacing, least = -(-machines // max(num_origins, 1)), max(machines // num_turns, 1)

    def num_places(stride: int) -> tuple[int, ...]:
        places = [turn * stride % machines for turn in range(min(num_turns, machines))]
        return len(set(places)), len({place % arc for place in places}), len({place % spacing for place in places})

    return max(range(least, least + machines), key=num_places)


@lru_cache
def distances(arc: int) -> list[int]:
    """Return the distances on the ring between machines of an arc that exchange messages."""
    places = np.arange(1, arc)
    found: list[int] = places[_without_highest_digit(places) == 0].tolist()
    return found


def num_passed(places: Ints) -> Ints:
    """Return how many machines pass a box on before it arrives at these places [N] of an arc."""
    passed = np.zeros_like(places)
    while places.any():
        passed += places > 0
        places = _without_highest_digit(places)
    return passed


def _without_highest_digit(places: Ints) -> Ints:
    rest: Ints = places % _power(places)
    return rest


def _power(place: Ints | int) -> Ints:
    """Return the highest power of `FAN_OUT` that is at most `place`, at least 1."""
    power: Ints = POWERS[np.maximum(np.searchsorted(POWERS, place, side="right") - 1, 0)]
    return power
