"""Where ranks run, and who serves whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TURNS = 48
"""Boxes take turns at whom they ask; counts to this and starts again. A multiple of the usual numbers of holders."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Which machine each rank is on."""

    nodes: tuple[int, ...]

    def same_node(self, a: int, b: int) -> bool:
        """True where two ranks share a machine."""
        return self.nodes[a] == self.nodes[b]

    @classmethod
    def single(cls, world: int) -> Topology:
        """All ranks on one machine."""
        return cls((0,) * world)


class Fan:
    """The ranks that hold a box and the ranks that need it: whom each asks.

    Best is the rank itself, then a member of its group, then a holder on its machine. Where a machine has no holder,
    one of its ranks fetches the box and hands it on to the others (`relay`), so that it enters the machine once.

        holders 0 1   needers 1 4 5 on machines {0, 1}, {4, 5}      1 <- 1     4 <- 0 (or 1)     5 <- 4

    Holders of equal worth take turns where they would not send alike otherwise.
    """

    def __init__(
        self,
        holders: Sequence[int],
        needers: Sequence[int],
        topology: Topology,
        group_of: Mapping[int, int],
        *,
        relay: bool,
    ) -> None:
        """Ranks in ascending order."""
        self._choices: dict[int, tuple[tuple[int, ...], int, tuple[int, ...]]] = {}
        """By needer: whom to choose from, its place among those who choose from the same, and who takes turns at
        fetching with it."""
        on_node, in_group = _gather(holders, topology.nodes), _gather(holders, group_of)
        held = set(holders)
        places: dict[tuple[int, ...], int] = {}
        remote: dict[int, list[int]] = {}
        for rank in needers:
            if rank in held:
                self._choices[rank] = ((rank,), 0, ())
                continue
            near = in_group.get(group_of.get(rank, -1)) or on_node.get(topology.nodes[rank])
            if near is None and relay:
                remote.setdefault(topology.nodes[rank], []).append(rank)
                continue
            choice = tuple(near or holders)
            self._choices[rank] = (choice, places.get(choice, 0), ())
            places[choice] = places.get(choice, 0) + 1
        # where everybody can always ask the same holder and all holders send alike, messages stay whole
        self._steady = {choice for choice, count in places.items() if count % len(choice) == 0}
        for place, ranks in enumerate(remote.values()):
            for rank in ranks:
                self._choices[rank] = (tuple(holders), place, tuple(ranks))

    def source(self, rank: int, turn: int) -> tuple[int, int]:
        """Whom `rank` receives from, and in which hop: 0 from a holder, 1 from the rank that fetches."""
        choice, place, peers = self._choices[rank]
        if peers:
            fetcher = peers[turn % len(peers)]
            if fetcher != rank:
                return fetcher, 1
        elif choice in self._steady:
            turn = 0
        return choice[(place + turn) % len(choice)], 0

    def served_by(self, source: int, turn: int, *, hop: int, among: Sequence[int]) -> list[int]:
        """Which other ranks of `among`, all of them needers, `source` sends to in the hop."""
        return [rank for rank in among if rank != source and self.source(rank, turn) == (source, hop)]


def _gather(ranks: Sequence[int], place_of: Sequence[int] | Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        place = place_of.get(rank) if isinstance(place_of, Mapping) else place_of[rank]
        if place is not None:
            found.setdefault(place, []).append(rank)
    return found
