"""Node placement of ranks, and the choice of the rank that each receiver gets a box from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROTATION = 48
"""Modulus of the index that rotates boxes over equal sources; a multiple of the usual numbers of holders."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The node that each rank runs on."""

    nodes: tuple[int, ...]

    def same_node(self, a: int, b: int) -> bool:
        """Return whether two ranks run on the same node."""
        return self.nodes[a] == self.nodes[b]

    @classmethod
    def single(cls, world: int) -> Topology:
        """Return a topology with all `world` ranks on one node."""
        return cls((0,) * world)


class SourceSelector:
    """Selects the source rank for each rank that needs a box, among the ranks that hold it.

    The rank itself comes first, then a member of its group, then a holder on its node. If no rank of the node holds
    the box, one rank of the node fetches it and relays it to the others (`relay`), so that it enters the node once.

        holders 0 1   receivers 1 4 5 on nodes {0, 1}, {4, 5}      1 <- 1     4 <- 0 (or 1)     5 <- 4

    Equally good holders are rotated if a fixed assignment would load them unevenly.
    """

    def __init__(
        self,
        holders: Sequence[int],
        receivers: Sequence[int],
        topology: Topology,
        group_of: Mapping[int, int],
        *,
        relay: bool,
    ) -> None:
        """Assign each receiver its candidate sources.

        Args:
            holders: ranks in ascending order.
            receivers: ranks in ascending order.
            group_of: by rank in a group, the group's index.
            relay: fetch a box once per node and relay it there.
        """
        self._choices: dict[int, tuple[tuple[int, ...], int, tuple[int, ...]]] = {}
        """By receiver: candidate sources, its position among receivers with the same candidates, and the ranks of its
        node that take turns at fetching."""
        on_node, in_group = _group_ranks(holders, topology.nodes), _group_ranks(holders, group_of)
        held = set(holders)
        positions: dict[tuple[int, ...], int] = {}
        remote: dict[int, list[int]] = {}
        for rank in receivers:
            if rank in held:
                self._choices[rank] = ((rank,), 0, ())
                continue
            candidates = in_group.get(group_of.get(rank, -1)) or on_node.get(topology.nodes[rank])
            if candidates is None and relay:
                remote.setdefault(topology.nodes[rank], []).append(rank)
                continue
            choice = tuple(candidates or holders)
            self._choices[rank] = (choice, positions.get(choice, 0), ())
            positions[choice] = positions.get(choice, 0) + 1
        # no rotation if a fixed assignment loads all holders equally: messages are then not split over sources
        self._fixed_choices = {choice for choice, count in positions.items() if count % len(choice) == 0}
        for position, ranks in enumerate(remote.values()):
            for rank in ranks:
                self._choices[rank] = (tuple(holders), position, tuple(ranks))

    def source(self, rank: int, rotation: int) -> tuple[int, int]:
        """Return the rank that `rank` receives from, and the hop: 0 from a holder, 1 from the fetching rank."""
        choice, position, peers = self._choices[rank]
        if peers:
            fetcher = peers[rotation % len(peers)]
            if fetcher != rank:
                return fetcher, 1
        elif choice in self._fixed_choices:
            rotation = 0
        return choice[(position + rotation) % len(choice)], 0

    def receivers_of(self, source: int, rotation: int, *, hop: int, among: Sequence[int]) -> list[int]:
        """Return the other ranks of `among`, all of them receivers, that `source` sends to in the hop."""
        return [rank for rank in among if rank != source and self.source(rank, rotation) == (source, hop)]


def _group_ranks(ranks: Sequence[int], key_of: Sequence[int] | Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        key = key_of.get(rank) if isinstance(key_of, Mapping) else key_of[rank]
        if key is not None:
            found.setdefault(key, []).append(rank)
    return found
