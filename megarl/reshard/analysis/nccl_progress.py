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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise

from megarl.reshard.analysis.sync_clock import run_groups
from megarl.reshard.layout.relay_tree import Ranks
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
        peers = f"rank{'s' if len(self.peers) != 1 else ''} {', '.join(map(str, self.peers))}"
        return f"rank {self.rank} waits in {self.step or f'group {self.group}'} for {peers}"


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
        hops = [(number, hop, rounds[number].hops[hop]) for number, hop in hops_of_step(rounds, step)]
        posted = [f"hop {hop} of round {number}" for number, hop, each in hops if each.sends or each.receives]
        sends = tuple([send.to for _, _, each in hops for send in each.sends])
        receives = tuple([message.source for _, _, each in hops for message in each.receives])
        groups.append(PostedGroup(sends=sends, receives=receives, step=" and ".join(posted)))
    return [group for group in groups if group.sends or group.receives or group.all_gathers]


def find_stalls(ranks: Sequence[Sequence[PostedGroup]]) -> list[Stall]:
    """Return the ranks that wait forever and what they wait for; empty if every group of every rank ends.

    The order in which ranks run does not matter: a group that ends in one order ends in every order.

    Args:
        ranks: by rank, the groups it posts, in order; each has operations.
    """
    first = list(accumulate(map(len, ranks), initial=0))
    rank_of = [rank for rank, of_rank in enumerate(ranks) for _ in of_rank]
    waits_for = [[i - 1] if i > begin else [] for begin, end in pairwise(first) for i in range(begin, end)]
    meetings = _find_meetings(ranks)
    members, ends = list(meetings.values()), [ranks for _, _, ranks, _ in meetings]
    missing = list(map(len, ends))
    groups = run_groups(waits_for, members, missing, lambda *_: 0.0)
    stalls = []
    for rank, of_rank in enumerate(ranks):
        place = next((i for i in range(len(of_rank)) if groups[first[rank] + i].open), None)
        if place is not None:
            peers: set[int] = set()
            for meeting in filter(missing.__getitem__, groups[first[rank] + place].exchanges):
                there = {rank_of[number] for number in members[meeting] if not groups[number].waits}
                peers |= set(ends[meeting]) - there or {rank}  # the rank itself, if it sends to itself
            stalls.append(Stall(rank, place, of_rank[place].step, tuple(sorted(peers))))
    return stalls


def _find_meetings(ranks: Sequence[Sequence[PostedGroup]]) -> dict[tuple[Ranks, bool, Ranks, int], list[int]]:
    """Return the messages and all-gathers of all ranks, each with the groups, counted over all ranks, that it is in.

    A key is (communicator, whether it is an all-gather, ranks of its ends, n): the n-th operations of all ends meet.
    """
    everyone, numbers = tuple(range(len(ranks))), count()
    found: dict[tuple[Ranks, bool, Ranks, int], list[int]] = {}
    for rank, of_rank in enumerate(ranks):
        posted = Counter[tuple[Ranks, str, Ranks]]()
        for group, number in zip(of_rank, numbers, strict=False):
            operations: list[tuple[str, Ranks]] = [("send", (rank, to)) for to in group.sends]
            operations += [("receive", (source, rank)) for source in group.receives]
            operations += [("all-gather", group.communicator or everyone)] * group.all_gathers
            for kind, ends in operations:
                posted[group.communicator, kind, ends] += 1
                nth = posted[group.communicator, kind, ends]
                found.setdefault((group.communicator, kind == "all-gather", ends, nth), []).append(number)
    return found
