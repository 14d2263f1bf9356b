"""How the nodes of a run find each other: one listens, the others look for it.

    rank 0   listens at the first free port of those that follow from the job
    others   try every host and port at which it may be, again and again, until it answers

A token tells the runs apart that would meet at the same place.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import time
from dataclasses import dataclass

from megarl.errors import LaunchError
from megarl.launch.connection import Link, LinkLostError
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import End, Hello, Noted, Refused, Welcome
from megarl.placement.network import is_loopback

ANSWER_SECONDS = 3.0
"""How long whoever is at a port may take to speak."""
CONNECT_SECONDS = 2.0
RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another node, as the head knows it."""

    hello: Hello
    link: Link
    address: str
    """Where the other nodes reach it."""

    def __str__(self) -> str:
        return f"node {self.hello.host} ({self.address}, rank {self.hello.rank})"


class Meeting:
    """The head's side: listens, and takes the nodes of its own run in.

    Args:
        own: what the head says of itself.
        node_timeout: seconds that a node may be silent.
    """

    def __init__(self, world: NodeWorld, own: Hello, node_timeout: float) -> None:
        self._world = world
        self._own = own
        self._node_timeout = node_timeout
        self._peers: dict[int, Peer] = {}
        self._refused: LaunchError | None = None
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """The port at which it listens now.

        Raises:
            LaunchError: all are taken.
        """
        for port in self._world.ports:
            try:
                self._server = await asyncio.start_server(self._greet, "0.0.0.0", port)  # noqa: S104 -- other nodes come
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise LaunchError(f"node {self._world.host}: cannot listen at port {port}: {e}") from e
                continue
            return port
        raise LaunchError(f"node {self._world.host} needs a free port among {_listed(self._world.ports)}, got none")

    async def gather(self, timeout_seconds: float) -> list[Peer]:
        """The other nodes by rank, once all are there.

        Raises:
            LaunchError: they are not in time, or one of them has other packages than the head.
        """
        expected = range(1, self._world.size)
        deadline = time.monotonic() + timeout_seconds
        while len(self._peers) < len(expected):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                missing = ", ".join(self._world.describe(rank) for rank in expected if rank not in self._peers)
                raise LaunchError(
                    f"of {self._world.size} nodes, {len(self._peers) + 1} met on {self._world.host} within "
                    f"{timeout_seconds:g} s; not there: {missing}"
                ) from None
            if self._refused is not None:
                raise self._refused
        return [self._peers[rank] for rank in expected]

    @property
    def peers(self) -> list[Peer]:
        """The nodes that are there."""
        return list(self._peers.values())

    async def close(self) -> None:
        """Take in nobody else."""
        if self._server is not None:
            self._server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, self._node_timeout)
        try:
            hello = await asyncio.wait_for(link.receive(), ANSWER_SECONDS)
        except (TimeoutError, LinkLostError):
            await link.close()  # no node of megarl's
            return
        refused = Refused(reason=f"expected Hello, got {hello}", ours=False)
        if isinstance(hello, Hello):
            peer = Peer(hello=hello, link=link, address=hello.address or link.remote_address)
            reason = self._objection(peer)
            if reason is None:
                self._peers[hello.rank] = peer
                link.send(Noted())
                self._changed.set()
                return
            refused = reason
        link.send(refused)
        await link.close()

    def _objection(self, peer: Peer) -> Refused | None:
        hello, world = peer.hello, self._world
        if hello.token != world.token:
            return Refused(reason="another job's nodes meet here", ours=False)
        if hello.rank in self._peers or not 0 < hello.rank < world.size:
            return Refused(reason=f"the run on {world.host} has its rank {hello.rank} already", ours=False)
        problem = None
        if hello.size != world.size:
            problem = f"{peer} was told of {hello.size} nodes, {world.host} (rank 0) of {world.size}"
        for package, version in self._own.versions.items():
            other = hello.versions.get(package)
            if other != version:
                problem = f"{peer} has {package} {other}, {world.host} (rank 0) has {version}: all nodes need the same"
        if problem is None:
            return None
        self._refused = LaunchError(problem)
        self._changed.set()
        return Refused(reason=problem, ours=True)


def addresses(peers: list[Peer], own: str | None) -> tuple[str, list[str]]:
    """Where nodes reach the head, and where each of the peers is reached.

    The head is where its peers have found it; one that shares its machine has found it on the loopback, and is
    reached where the head is.

    Args:
        own: where the user wants the head to be reached.
    """
    found = [peer.link.local_address for peer in peers]
    head = own or next((address for address in found if not is_loopback(address)), "127.0.0.1")
    return head, [peer.hello.address or (head if is_loopback(peer.address) else peer.address) for peer in peers]


async def find_head(
    world: NodeWorld, hello: Hello, *, join_timeout: float, node_timeout: float
) -> tuple[Link, Welcome | End]:
    """A connection to the head of this node's run, and what it said when all were there, or not.

    Raises:
        LaunchError: it is nowhere, or does not take this node in.
    """
    deadline = time.monotonic() + join_timeout
    # every host at the likeliest port first: a name that does not resolve may take seconds
    places = [(host, port) for port in world.ports for host in world.head_hosts]
    last = ""
    for host, port in itertools.cycle(places):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node {world.host} (rank {world.rank}) found no head within {join_timeout:g} s, at "
                f"{' or '.join(world.head_hosts)}, ports {_listed(world.ports)}: {last}"
            )
        try:
            found = await _ask(host, port, hello, node_timeout)
        except (OSError, TimeoutError, LinkLostError) as e:
            last = f"{host}:{port}: {e or 'no answer'}"
            found = None
        if found is not None:
            return found
        if (host, port) == places[-1]:
            await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError(places)


async def _ask(host: str, port: int, hello: Hello, node_timeout: float) -> tuple[Link, Welcome | End] | None:
    """The head's answer; None where another job's head is."""
    connecting = asyncio.open_connection(host, port, family=socket.AF_INET)
    reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
    link = Link(reader, writer, node_timeout)
    try:
        link.send(hello)
        answer = await asyncio.wait_for(link.receive(), ANSWER_SECONDS)
        if isinstance(answer, Noted):
            answer = await link.receive()
    except BaseException:
        await link.close()
        raise
    if isinstance(answer, Welcome | End):
        return link, answer
    await link.close()
    if isinstance(answer, Refused) and answer.ours:
        raise LaunchError(answer.reason)
    return None


def _listed(ports: tuple[int, ...]) -> str:
    return f"{ports[0]}" if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
