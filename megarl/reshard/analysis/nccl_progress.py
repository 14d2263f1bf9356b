"""Proof, before anything is launched, that the messages of a plan make progress under NCCL's rules.

A rank posts its operations in groups (`ncclGroupStart` to `ncclGroupEnd`). A group is one kernel on a stream: it starts
when the rank's previous group has ended, and it ends when each of its operations has met its counterpart in a group
that the peer has started. Ranks that wait for each other's later groups therefore wait forever:

    rank 0    group 0: receive from 1          group 1: send to 1
    rank 1    group 0: receive from 0          group 1: send to 0          both stall in group 0

The model is stricter than NCCL, so a plan that passes here cannot stall there for these reasons:

- All communicators of a rank share one stream; torch gives each communicator a stream of its own. This also covers
  every wait of the executor for its own messages, as they belong to earlier groups.
- A send ends only when the peer has started to receive it; NCCL buffers small ones.
- An all-gather ends only when every member has started it.

Communicators are taken as connected. (One that its first group connects makes all of its ranks wait for each other.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.reshard.layout.layout import Ints, count_up
from megarl.reshard.planning.rounds import Round, hops_of_step


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedGroup:
    """Operations that one rank posts as one group, on one communicator."""

    sends: tuple[int, ...] = ()
    """By message, its destination; the messages of a pair of ranks match in order."""
    receives: tuple[int, ...] = ()
    """By message, its source."""
    all_gathers: int = 0
    """Number of all-gathers over all ranks of the communicator."""
    communicator: tuple[int, ...] = ()
    """Ranks of the communicator; empty: all ranks."""
    step: str = ""
    """Name of the group for messages, such as `hop 1 of round 3`."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that waits forever."""

    rank: int
    group: int
    """Index of the group that it waits in, among the groups that it posts."""
    step: str
    """`PostedGroup.step` of that group."""
    peers: tuple[int, ...]
    """Ranks that have not started the other end of an operation of the group, ascending."""

    def __str__(self) -> str:
        return f"rank {self.rank} waits in {self.step or f'group {self.group}'} for {name_ranks(self.peers)}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 3, 4`."""
    listed = list(ranks)
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"


def posted_groups(rounds: Sequence[Round], members: Sequence[int] = ()) -> list[PostedGroup]:
    """Return the groups that `BoxExecutor.run` posts for the rounds of one rank, in order.

    For each round k, these are its all-gathers, which are one call, and its hop 0 together with hop 1 of round k - 1,
    hop 2 of round k - 2 and so on. A step without messages posts no group.

    Args:
        members: ranks of the plan's all-gather group; empty without one.
    """
    groups: list[PostedGroup] = []
    num_hops = max((len(this.hops) for this in rounds), default=0)
    for step in range(len(rounds) + num_hops - 1):
        if step < len(rounds):
            gathers, name = len(rounds[step].gathers), f"the all-gathers of round {step}"
            groups.append(PostedGroup(all_gathers=gathers, communicator=tuple(members), step=name))
        groups.append(_messages(rounds, step))
    return [group for group in groups if group.sends or group.receives or group.all_gathers]


def _messages(rounds: Sequence[Round], step: int) -> PostedGroup:
    """Return the messages of all hops that are started in a step."""
    hops = [(number, hop, rounds[number].hops[hop]) for number, hop in hops_of_step(rounds, step)]
    return PostedGroup(
        sends=tuple([send.to for _, _, each in hops for send in each.sends]),
        receives=tuple([message.source for _, _, each in hops for message in each.receives]),
        step=" and ".join(f"hop {hop} of round {number}" for number, hop, each in hops if each.sends or each.receives),
    )


def find_stalls(ranks: Sequence[Sequence[PostedGroup]]) -> list[Stall]:
    """Return the ranks that wait forever and what they wait for; empty if every group of every rank ends.

    It takes the time of sorting the operations of all ranks. The order in which ranks run does not matter: a group that
    ends in one order ends in every order.

    Args:
        ranks: by rank, the groups it posts, in order; each has operations.
    """
    return _Operations(ranks).find_stalls()


class _Operations:
    """The operations of all ranks as flat arrays, and which of them meet: the two ends of a message, or an all-gather.

    N operations in G groups form M meetings.
    """

    def __init__(self, ranks: Sequence[Sequence[PostedGroup]]) -> None:
        self._groups = [group for groups in ranks for group in groups]
        counts = [len(groups) for groups in ranks]
        self._rank = np.repeat(np.arange(len(ranks)), counts)
        """[G]"""
        self._first = np.cumsum([0, *counts])
        """[number of ranks + 1], the first group of each rank."""
        keys = self._keys(len(ranks))
        self._group, self._peer = keys[:, 0], keys[:, 1]
        """[N], ascending; and the rank at the other end, -1 for an all-gather."""
        self._start = np.searchsorted(self._group, np.arange(len(self._groups) + 1))
        """[G + 1], the first operation of each group."""
        assert (np.diff(self._start) > 0).all(), "a group without operations is not posted"
        self._meeting, self._size = _match(keys[:, 2:])
        """[N]; and [M], the number of operations that each meeting needs."""
        self._by_meeting = np.argsort(self._meeting, kind="stable")
        self._meeting_start = np.searchsorted(self._meeting[self._by_meeting], np.arange(len(self._size) + 1))

    def _keys(self, world: int) -> Ints:
        """Return [N, 7]: group, peer, then what `_match` takes."""
        channels: dict[tuple[int, ...], int] = {}
        rows: list[tuple[int, ...]] = []
        for number, (rank, group) in enumerate(zip(self._rank.tolist(), self._groups, strict=True)):
            channel = channels.setdefault(group.communicator, len(channels))
            rows += [(number, to, channel, rank, to, 0, 2) for to in group.sends]
            rows += [(number, source, channel, source, rank, 1, 2) for source in group.receives]
            if group.all_gathers:
                members = len(group.communicator) or world
                rows += [(number, -1, channel, -1, -1, rank, members)] * group.all_gathers
        return np.array(rows, np.int64).reshape(-1, 7)

    def find_stalls(self) -> list[Stall]:
        """Start groups in waves, each of the groups that can start once the previous wave's have ended."""
        missing = self._size.copy()  # operations of a meeting that have not started
        counts = np.diff(self._start)
        unmet = counts.copy()  # operations of a group that have not met
        current = self._first[:-1].copy()  # by rank, the group that it is in
        started = current[current < self._first[1:]]
        while len(started):
            joined = self._meeting[count_up(self._start[started], counts[started])[1]]
            np.subtract.at(missing, joined, 1)
            met = np.unique(joined[missing[joined] == 0])
            groups = self._group[self._by_meeting[count_up(self._meeting_start[met], self._size[met])[1]]]
            np.subtract.at(unmet, groups, 1)
            ended = np.unique(groups[unmet[groups] == 0])
            current[self._rank[ended]] = ended + 1
            started = ended[ended + 1 < self._first[self._rank[ended] + 1]] + 1
        stalled = np.flatnonzero(current < self._first[1:])
        return [self._stall(int(rank), current, missing) for rank in stalled]

    def _stall(self, rank: int, current: Ints, missing: Ints) -> Stall:
        number = int(current[rank])
        operations = np.arange(*self._start[number : number + 2])
        late = operations[missing[self._meeting[operations]] > 0]
        peers = set(self._peer[late].tolist()) - {-1}
        for operation in late[self._peer[late] < 0]:
            meeting = self._meeting[operation]
            ends = self._group[self._by_meeting[slice(*self._meeting_start[meeting : meeting + 2])]]
            there = set(self._rank[ends[ends <= current[self._rank[ends]]]].tolist())
            members = self._groups[number].communicator or range(len(current))
            peers |= set(members) - there
        return Stall(rank, number - int(self._first[rank]), self._groups[number].step, tuple(sorted(peers)))


def _match(keys: Ints) -> tuple[Ints, Ints]:
    """Return the meeting of each operation [N], and the number of operations that each meeting needs [M].

    Args:
        keys: [N, 5], in the order of posting on each rank: communicator, source, destination, a number that tells the
            ends of an operation apart, and the number of ends. The n-th operations of all ends meet.
    """
    if not len(keys):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort(keys[:, 3::-1].T)
    is_new = _changes(keys[order, :4])
    position = np.arange(len(keys))
    nth = position - np.maximum.accumulate(np.where(is_new, position, 0))
    columns = np.column_stack([keys[order, :3], nth])
    again = np.lexsort(columns[:, ::-1].T)
    is_new = _changes(columns[again])
    meeting = np.empty(len(keys), np.int64)
    meeting[order[again]] = np.cumsum(is_new) - 1
    return meeting, keys[order[again][is_new], 4]


def _changes(rows: Ints) -> Ints:
    """Return bool [N]: whether each of the sorted rows differs from the row before."""
    changes: Ints = np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)]
    return changes
