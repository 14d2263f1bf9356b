"""Links of given rates between ranks on one machine: gloo messages in NCCL's order that take as long as on a cluster.

Each rank has a link to the other ranks of its machine (NVLink) and one to other machines (a NIC), each with a rate for
sending and one for receiving. The rules are those of the clock of a plan (`megarl.reshard.analysis.sync_clock`):

    a message can move    once both of its ends have started the group that it is in
    a link                works off its messages one after another, in the order in which they can move, at its rate
    a message ends        when both of its links have worked it off; a group when all of its messages have ended
    an all-gather         moves the shares around a ring of its ranks, over all of their links at once

Data moves over gloo as fast as it can, and the rank then sleeps until the links would be done:

    rank 0    | post | gloo .. | sleep ............................ | next group
    rank 1           | post | gloo .. | sleep ..................... | next group
                     ^ both ends have started: the message occupies its links from here on

The ranks are threads or processes of one machine. They share the times at which links are free in a mapped file.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch import Tensor

from benchmarks.reshard.nccl_order import NcclOrderTransport, StreamCommunicator, StreamWork
from megarl.errors import ConfigError
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.transfer.transport import InFlight, Message

SEND, RECEIVE = 0, 1
"""Directions of a link."""

SLOTS = 2
"""Exchanges between the same ranks whose end is kept: a rank is at most one exchange ahead of another."""

LinkKind = Literal["nvlink", "nic"]


type Exchange = tuple[int, int, int]
"""A message that a rank has started, (source, destination, number modulo `SLOTS`); a ring has its first rank twice."""


class SlowedLinks:
    """The links of all ranks: when each is free, and how long it has been occupied.

    Each rank has an object of its own; all use the same file.
    """

    def __init__(self, file: Path, topology: Topology, rates: LinkRates) -> None:
        """Open the file, which may be empty.

        Raises:
            ConfigError: the file does not exist on this machine.
        """
        self.rates, self._nodes = rates, topology.nodes
        self._nic_of, self.nic_rates = _assign_nics(topology, rates)
        world, nics = len(topology.nodes), len(self.nic_rates)
        shapes: dict[str, tuple[int, ...]] = {
            "nvlink_free": (2, world),
            "nic_free": (2, nics),
            "nvlink_seconds": (2, world),
            "nic_seconds": (2, nics),
            "nvlink_bytes": (2, world),
            "nic_bytes": (2, nics),
            "started": (2, world, world),
            "ring_started": (world,),
            "size": (world, world, SLOTS),
            "end": (world, world, SLOTS),
        }
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        try:
            self._lock_file = file.open("r+b")
        except FileNotFoundError as e:
            raise ConfigError(f"links of given rates need all ranks on one machine: {file} is not on this one") from e
        with self._locked():
            self._lock_file.truncate(8 * sum(sizes.values()))
        data = np.memmap(file, np.float64, "r+")
        at = 0
        self._tables: dict[str, Any] = {}
        for name, shape in shapes.items():
            self._tables[name] = data[at : at + sizes[name]].reshape(shape)
            at += sizes[name]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)  # of the open file: it excludes threads, too
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def seconds(self, kind: LinkKind) -> Any:
        """Return [2, N] the seconds that each link has been occupied, by sending and by receiving."""
        return self._tables[f"{kind}_seconds"].copy()

    def bytes(self, kind: LinkKind) -> Any:
        """Return [2, N] the bytes that each link has sent and received."""
        return self._tables[f"{kind}_bytes"].copy()

    def start(self, rank: int, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]) -> list[Exchange]:
        """Start a group of messages; those that the other end has started can move from now on.

        Args:
            sends: (destination, bytes); one for each destination.
            receives: (source, bytes); one for each source.
        """
        ends = [(rank, to, SEND, size) for to, size in sends]
        ends += [(source, rank, RECEIVE, size) for source, size in receives]
        started = self._tables["started"]
        found = []
        with self._locked():
            now = time.monotonic()
            for source, to, direction, size in ends:
                number = int(started[direction, source, to])
                started[direction, source, to] += 1
                slot = source, to, number % SLOTS
                found.append(slot)
                if started[1 - direction, source, to] <= number:
                    self._tables["size"][slot] = size
                    continue
                expected = int(self._tables["size"][slot])
                assert expected == size, f"rank {source} sends {to} another number of bytes: {size}, {expected}"
                self._tables["end"][slot] = self._move(source, to, size, now)
        return found

    def start_ring(self, ranks: Sequence[int], share: int) -> Exchange:
        """Start an all-gather of `share` bytes of each rank; it moves once all of `ranks` have started it."""
        first = ranks[0]
        with self._locked():
            before = int(self._tables["ring_started"][first])
            self._tables["ring_started"][first] += 1
            slot = first, first, before // len(ranks) % SLOTS
            if before % len(ranks) == len(ranks) - 1:
                now, size = time.monotonic(), share * (len(ranks) - 1)
                edges = zip(ranks, [*ranks[1:], first], strict=True)
                self._tables["end"][slot] = max(self._move(source, to, size, now) for source, to in edges)
        return slot

    def end(self, exchanges: Sequence[Exchange]) -> float:
        """Return the time (monotonic) at which a group of exchanges ends, all of whose ranks have started them."""
        with self._locked():
            end = max(float(self._tables["end"][each]) for each in exchanges)
        return end + self.rates.group_seconds

    def _move(self, source: int, to: int, size: int, now: float) -> float:
        """Occupy both links of a message from now on; return when it ends."""
        kind = "nvlink" if self._nodes[source] == self._nodes[to] else "nic"
        end = now
        for direction, rank in ((SEND, source), (RECEIVE, to)):
            link = rank if kind == "nvlink" else self._nic_of[rank]
            seconds = size / (self.rates.nvlink if kind == "nvlink" else self.nic_rates[link])
            free = self._tables[f"{kind}_free"]
            free[direction, link] = max(free[direction, link], now) + seconds
            self._tables[f"{kind}_seconds"][direction, link] += seconds
            self._tables[f"{kind}_bytes"][direction, link] += size
            end = max(end, float(free[direction, link]))
        return end

    def close(self) -> None:
        """Close the file."""
        self._lock_file.close()


@contextmanager
def shared_links(topology: Topology, rates: LinkRates) -> Iterator[SlowedLinks]:
    """Make the links of the ranks of torch's default group, all on one machine. Collective.

    Raises:
        ConfigError: this rank is on another machine than rank 0.
    """
    paths = [""]
    if dist.get_rank() == 0:
        handle, paths[0] = tempfile.mkstemp(prefix="megarl-links-")
        os.close(handle)
    dist.broadcast_object_list(paths)
    try:
        links = SlowedLinks(Path(paths[0]), topology, rates)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            Path(paths[0]).unlink()
    with closing(links):
        yield links


def _assign_nics(topology: Topology, rates: LinkRates) -> tuple[list[int], list[float]]:
    """Return, by rank, its NIC and, by NIC, its rate; several NICs of one rank count as one of their joint rate."""
    nic_of, nic_rates = [0] * len(topology.nodes), list[float]()
    for ranks in topology.ranks_of.values():
        num_nics = rates.num_nics(len(ranks))
        used = min(num_nics, len(ranks))
        for i, rank in enumerate(ranks):
            nic_of[rank] = len(nic_rates) + i * used // len(ranks)
        nic_rates += [rates.network * num_nics / used] * used
    return nic_of, nic_rates


class SlowedTransport(NcclOrderTransport):
    """`NcclOrderTransport` over links of given rates."""

    def __init__(self, links: SlowedLinks, group: Any, timeout_seconds: float) -> None:
        """Use a gloo process group whose ranks are those of the links."""
        super().__init__(group, timeout_seconds)
        self.links = links

    def _make_communicator(self, group: Any) -> StreamCommunicator:
        gathers = None if group is self._group else dist.get_process_group_ranks(group)
        return _SlowedCommunicator(group, self.links, gathers)

    def _start_coalesced(
        self, group: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[InFlight], list[InFlight]]:
        received, sent = super()._start_coalesced(group, sends, receives)
        return _without_polling(received), _without_polling(sent)

    def _begin_gathers(self, gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[InFlight]:
        return _without_polling(super()._begin_gathers(gathers, group))


class _SlowedCommunicator(StreamCommunicator):
    """A stream whose groups of messages end when their links have worked them off."""

    def __init__(self, group: Any, links: SlowedLinks, gathers: Sequence[int] | None) -> None:
        """`gathers`: ranks in the plan of the group's members, if the stream runs all-gathers; else None."""
        super().__init__(group)
        self._links, self._gathers, self._rank = links, gathers, group.rank()

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> bool:
        if self._gathers is None:
            started = self._links.start(self._rank, _by_peer(sends), _by_peer(receives))
        else:
            started = [self._links.start_ring(self._gathers, sends[0][0].nbytes)]
        if not super()._exchange(sends, receives):
            return False
        left = self._links.end(started) - time.monotonic()
        with self._changed:
            return not self._changed.wait_for(lambda: self._is_aborted, max(left, 0.0))


def _by_peer(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return (peer, bytes of all messages) for each peer."""
    found: dict[int, int] = {}
    for tensor, peer in messages:
        found[peer] = found.get(peer, 0) + tensor.nbytes
    return list(found.items())


@dataclass(frozen=True, slots=True)
class _Blocking:
    """A work whose end is waited for without looking at it again and again, which would cost CPU time."""

    work: StreamWork

    def is_completed(self) -> bool:
        """Return whether the work has ended."""
        return self.work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait at most `timeout` from now on; return whether the work has ended. Raises RuntimeError if it failed."""
        return self.work.wait_until_ended(timeout)


def _without_polling(messages: list[InFlight]) -> list[InFlight]:
    for message in messages:
        if message.is_polled:
            message.work, message.is_polled = _Blocking(message.work), False
    return messages
