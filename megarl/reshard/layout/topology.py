"""Node placement of ranks, rates of their links, and the choice of the rank that each receiver gets a box from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megarl.reshard.layout.layout import Ints
from megarl.reshard.layout.relay_tree import (
    FIRST_ENTRY,
    UNLIMITED,
    Entry,
    Path,
    RelayTree,
    RemoteSources,
    first_sources,
    ring_stride,
)


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

    @property
    def ranks_of(self) -> dict[int, list[int]]:
        """The ranks of each node, ascending."""
        return dict(sorted(_group_ranks(range(len(self.nodes)), self.nodes).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates of the links of a cluster, in bytes per second, for sending and for receiving each."""

    network: float = 50e9
    """Of one NIC; 50e9 is that of a 400 Gbit/s port."""
    nvlink: float = 400e9
    """Of one rank to the other ranks of its node; 400e9 is about what NVLink 4 gives of its 450e9."""
    nics_per_machine: int | None = None
    """NICs of a node, which its ranks share evenly, consecutive ranks the same NIC; None: one for each rank."""
    group_seconds: float = 20e-6
    """Time that a group of messages takes in addition to that of its bytes."""

    def __post_init__(self) -> None:
        assert self.network > 0, self
        assert self.nvlink > 0, self
        assert self.nics_per_machine is None or self.nics_per_machine > 0, self

    def num_nics(self, num_ranks: int) -> int:
        """Return the number of NICs of a node with `num_ranks` ranks."""
        return num_ranks if self.nics_per_machine is None else self.nics_per_machine

    def rank_network(self, num_ranks: int) -> float:
        """Return the rate at which one rank of a node with `num_ranks` ranks sends over the network, at most."""
        return self.network * max(self.num_nics(num_ranks) / num_ranks, 1)


class SourceSelector:
    """Selects the source rank for each rank that needs a box, among the ranks that hold it.

    The rank itself comes first, then a member of its group, then a holder on its node. If no rank of the node holds
    the box, one rank of the node fetches it and relays it to the others, so that it enters the node once:

        holders 0 1   receivers 1 4 5 on nodes {0, 1}, {4, 5}      1 <- 1     4 <- 0 (or 1)     5 <- 4

    If holders are not to send it to each such node (`RemoteSources`), nodes also relay the box to each other
    (`RelayTree`). On a node that holds the box, a rank that needs it relays it to other nodes.

    Equally good sources take turns. Only a few turns differ for boxes that come from other nodes, so that a rank does
    not exchange messages with every rank of other nodes. If even that would be too many, an `Entry` determines where
    the boxes enter.
    """

    def __init__(
        self,
        holders: Sequence[int],
        receivers: Sequence[int],
        topology: Topology,
        group_of: Mapping[int, int],
        remote: RemoteSources = UNLIMITED,
        entry: Entry = FIRST_ENTRY,
    ) -> None:
        """Assign each receiver its candidate sources.

        Args:
            holders: ranks in ascending order.
            receivers: ranks in ascending order.
            group_of: by rank in a group, the group's index.
            remote: limits on the sources of boxes from other nodes.
            entry: where boxes enter the ring of machines in turn 0.
        """
        self._choices: dict[int, tuple[tuple[int, ...], int]] = {}
        """By receiver that a holder serves: candidate sources, its position among receivers with the same."""
        on_node, in_group = _group_ranks(holders, topology.nodes), _group_ranks(holders, group_of)
        held = set(holders)
        self._num_served: dict[tuple[int, ...], int] = {}
        """By candidate sources, the number of receivers that they serve. A turn begins where the one before ended."""
        fetching: dict[int, list[int]] = {}
        for rank in receivers:
            if rank in held:
                self._choices[rank] = ((rank,), 0)
                continue
            candidates = in_group.get(group_of.get(rank, -1)) or on_node.get(topology.nodes[rank])
            if candidates is None:
                fetching.setdefault(topology.nodes[rank], []).append(rank)
                continue
            choice = tuple(candidates)
            self._choices[rank] = (choice, self._num_served.get(choice, 0))
            self._num_served[choice] = self._num_served.get(choice, 0) + 1
        self._holders, self._position = np.array(holders, np.int64), {rank: i for i, rank in enumerate(holders)}
        ranks_of = _group_ranks(receivers, topology.nodes) if fetching else {}
        if remote.even_origins and len(ranks_of) > len(fetching) + 1:
            ranks_of = _spread_origins(ranks_of, list(fetching), entry.rotation)
        machines = [fetching.get(node, ranks) for node, ranks in ranks_of.items()]
        self._machine_of = {rank: number for number, ranks in enumerate(machines) for rank in ranks}
        self._members = np.array(list(chain(*machines)), np.int64)
        """Of all nodes that need the box, the ranks that take turns at fetching it, or at relaying what they hold."""
        self._size = np.array([*map(len, machines)], np.int64)
        """By node, the number of these."""
        self._first_member = np.cumsum(self._size) - self._size
        self._is_holder = np.zeros(len(topology.nodes), bool)
        self._is_holder[self._holders] = True
        origins = [number for number, node in enumerate(ranks_of) if node not in fetching]
        num_roots = 1 if tuple(receivers) in remote.single_root else len(holders)
        arc = remote.arc_lengths(np.array(len(ranks_of)), np.array(num_roots))
        self._tree = RelayTree(len(ranks_of), int(arc), frozenset(origins))
        self._num_turns = remote.num_turns
        self._stride = 1
        if fetching and remote.num_turns is not None:
            self._stride = ring_stride(self._tree.machines, self._tree.arc, len(origins), remote.num_turns)
        self._entry = entry
        self._first_root: dict[int, int] = {}
        """By node that lacks the box, the position of its root in turn 0, if such nodes get all boxes from roots."""
        if self._tree.arc == 1:
            lacking = [number for number in range(len(machines)) if number not in self._tree.origins]
            order = first_sources(remote.num_turns, len(holders))
            places = np.flatnonzero(order == self._entry.root % len(holders)) + np.arange(len(lacking))
            self._first_root = dict(zip(lacking, order[places % len(order)].tolist(), strict=True))

    def sources(self, rank: int, turn: Ints) -> tuple[Ints, Ints]:
        """Return the ranks [N] that `rank` receives N boxes from, and the hops [N].

        Hop 0 is from a holder. A rank that relays a box which it receives in hop h does so in hop h + 1.

        Args:
            turn: [N], the boxes' turns among equally good sources.
        """
        if rank in self._choices:
            choice, position = self._choices[rank]
            place = (position + turn * self._num_served.get(choice, 0)) % len(choice)
            return np.array(choice, np.int64)[place], np.zeros(len(turn), np.int64)
        machine, (turn, rotation) = self._machine_of[rank], self._limit(turn)
        fetcher, path = self._fetcher(machine, turn), self._tree.path(machine, rotation)
        if self._tree.arc == 1:
            root = self._first_root.get(machine, 0) + turn
        else:
            root = path.root + self._shift(turn) + self._entry.root
        source = self._holders[root % len(self._holders)]
        some = np.flatnonzero(path.parent >= 0)
        source[some] = self._fetcher(path.parent[some], turn[some])
        hop = self._arrival(path, turn)
        return np.where(fetcher == rank, source, fetcher), np.where(fetcher == rank, hop, hop + 1)

    def sends(self, source: int, turn: Ints, among: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Return which of N boxes `source` sends: (indices into `turn`, receiving ranks, hops).

        Args:
            among: receivers to consider; `source` itself is left out.
        """
        found = [(np.zeros(0, np.int64),) * 3]
        if source in self._position:
            for rank in among:
                if rank != source and rank in self._choices and source in self._choices[rank][0]:
                    sources, _ = self.sources(rank, turn)
                    found.append(_select(np.flatnonzero(sources == source), rank, 0))
            if len(self._tree.origins) < len(self._size):
                found.append(self._enters(source, turn))
        if source in self._machine_of:
            machines = {self._machine_of[rank] for rank in among if rank in self._machine_of}
            found += self._relays(source, turn, machines)
        boxes, ranks, hops = (np.concatenate(column) for column in zip(*found, strict=True))
        is_among = np.zeros(len(self._is_holder), bool)
        is_among[list(among)] = True
        kept = is_among[ranks]
        return boxes[kept], ranks[kept], hops[kept]

    def _enters(self, source: int, turn: Ints) -> tuple[Ints, Ints, Ints]:
        """Return what `source`, a holder, sends as a root."""
        turn, rotation = self._limit(turn)
        if self._tree.arc == 1:
            number, first = (np.array([*column], np.int64) for column in (self._first_root, self._first_root.values()))
            root = (first + turn[:, None]) % len(self._holders)
            boxes, place = np.nonzero(root == self._position[source])
            machine = number[place]
        else:
            first = (self._position[source] - self._shift(turn) - self._entry.root) % len(self._holders)
            arcs = first[:, None] + np.arange(0, self._tree.num_roots, len(self._holders))
            entered = self._tree.entries(arcs, rotation[:, None])
            boxes, place = np.nonzero(entered >= 0)
            machine = entered[boxes, place]
        return boxes, self._fetcher(machine, turn[boxes]), np.zeros(len(boxes), np.int64)

    def _relays(self, source: int, turn: Ints, machines: Collection[int]) -> list[tuple[Ints, Ints, Ints]]:
        """Return what `source` passes on to ranks of these machines."""
        machine, (turn, rotation) = self._machine_of[source], self._limit(turn)
        mine = np.flatnonzero(self._fetcher(machine, turn) == source)
        children = self._tree.children(machine, rotation[mine], machines)
        is_on_machine = machine in machines and machine not in self._tree.origins  # else holders send to the others
        if not children and not is_on_machine:
            return []
        hop = self._arrival(self._tree.path(machine, rotation[mine]), turn[mine]) + 1
        found = [(mine[boxes], self._fetcher(number, turn[mine[boxes]]), hop[boxes]) for boxes, number in children]
        if is_on_machine:
            members = self._members[self._first_member[machine] :][: self._size[machine]].tolist()
            found += [_select(mine, rank, hop) for rank in members if rank != source]
        return found

    def _arrival(self, path: Path, turn: Ints) -> Ints:
        """Return the hop [N] in which each box arrives at the rank that fetches it; -1: that rank holds it."""
        arrival = path.passed.copy()
        some = np.flatnonzero(path.origin >= 0)
        arrival[some] -= self._is_holder[self._fetcher(path.origin[some], turn[some])]
        return arrival

    def _limit(self, turn: Ints) -> tuple[Ints, Ints]:
        """Return the turns [N] of boxes from other nodes, and where each box enters the ring of machines [N]."""
        if self._num_turns is not None:
            turn = turn % self._num_turns
        return turn, self._rotation(turn)

    def _rotation(self, turn: Ints) -> Ints:
        return self._entry.rotation + turn * self._stride

    def _shift(self, turn: Ints) -> Ints:
        """Return by how many positions the roots of each box [N] are moved on among the holders.

        If not all holders are roots, the next ones are in the next turn. If they are, each machine gets boxes from each
        root within as many turns as there are machines, as the place where boxes enter the ring moves on; only after
        them, all roots are moved on by one holder.
        """
        machines = len(self._size)
        if self._tree.num_roots < len(self._holders):
            return turn * self._tree.num_roots
        if self._num_turns is not None and self._num_turns < machines:
            return turn
        return turn // machines

    def _fetcher(self, machine: int | Ints, turn: Ints) -> Ints:
        """Return the rank of the machine, or of each box's machine [N], that fetches each box [N]."""
        count, arc = len(self._size), self._tree.arc
        at = (machine + self._rotation(turn)) % count
        # each rank is equally often at each place of an arc, where machines pass on unequally many boxes
        number = turn + machine if arc == 1 else at % arc + at // arc + turn // count
        place = (number + self._entry.fetcher) % self._size[machine]
        fetcher: Ints = self._members[self._first_member[machine] + place]
        return fetcher


def _spread_origins(ranks_of: Mapping[int, list[int]], lacking: Sequence[int], shift: int) -> dict[int, list[int]]:
    """Return the nodes in an order in which those that do not lack the box lie at equal distances.

    Args:
        shift: the one of `lacking` that is the first, modulo their number: those next to nodes that hold the box pass
            it on more or less often than others, depending on the side.
    """
    place: dict[int, float] = {}
    begin = shift % len(lacking)
    for nodes, first in (
        ([n for n in ranks_of if n not in lacking], 0.0),
        ([*lacking[begin:], *lacking[:begin]], 0.5),
    ):
        place |= {node: (number + first) / len(nodes) for number, node in enumerate(nodes)}
    return {node: ranks_of[node] for node in sorted(ranks_of, key=place.__getitem__)}


def _select(boxes: Ints, rank: int, hop: Ints | int) -> tuple[Ints, Ints, Ints]:
    ranks = np.full(len(boxes), rank, np.int64)
    return boxes, ranks, np.broadcast_to(np.asarray(hop, np.int64), len(boxes))


def _group_ranks(ranks: Sequence[int], key_of: Sequence[int] | Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        key = key_of.get(rank) if isinstance(key_of, Mapping) else key_of[rank]
        if key is not None:
            found.setdefault(key, []).append(rank)
    return found
