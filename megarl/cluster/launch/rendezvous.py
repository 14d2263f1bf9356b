"""Rendezvous of the nodes of a launch: the head listens, the worker nodes search for it.

    rank 0   listens on the first free one of the ports derived from the job
    others   retry every possible host and port of the head until it answers, and authenticate it

The ports of other runs may coincide: a head that belongs to another job, or does not know the secret, is skipped.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from megarl.cluster.launch.connection import (
    Accepted,
    Connection,
    ConnectionLostError,
    End,
    Hello,
    OtherJobError,
    Refused,
    UntrustedHeadError,
    Welcome,
    answer_node,
    authenticate_head,
    close_writer,
)
from megarl.cluster.launch.node_world import SECRET_VARIABLE, NodeWorld
from megarl.cluster.placement.hardware import is_loopback
from megarl.errors import LaunchError

ANSWER_TIMEOUT_SECONDS = 3.0
"""Time limit for the first message of a new connection."""
CONNECT_TIMEOUT_SECONDS = 2.0
RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A connected worker node, as seen by the head."""

    hello: Hello
    connection: Connection
    address: str
    """Address at which the other nodes reach it."""

    def __str__(self) -> str:
        return f"node {self.hello.host} ({self.address}, rank {self.hello.rank})"


class Rendezvous:
    """The head's side of the rendezvous: accepts the nodes of its own run.

    Args:
        own_hello: message in which the head describes itself.
        node_timeout: seconds without a message after which a node counts as lost.
    """

    def __init__(self, world: NodeWorld, own_hello: Hello, node_timeout: float) -> None:
        self._world = world
        self._own_hello = own_hello
        self._node_timeout = node_timeout
        self._peers: dict[int, Peer] = {}
        self._rejection: LaunchError | None = None
        self._untrusted_addresses: dict[str, None] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def listen(self) -> int:
        """Start listening on the first free port and return it.

        Raises:
            LaunchError: no port is free.
        """
        for port in self._world.ports:
            try:
                self._server = await asyncio.start_server(self._handle_connection, "0.0.0.0", port)  # noqa: S104 -- for other nodes
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise LaunchError(f"node {self._world.host}: cannot listen at port {port}: {e}") from e
                continue
            return port
        raise LaunchError(
            f"node {self._world.host} needs a free port among {_format_ports(self._world.ports)}, got none"
        )

    async def wait_for_peers(self, timeout_seconds: float) -> list[Peer]:
        """Wait until all other nodes are connected and return them by rank.

        Raises:
            LaunchError: a node did not connect in time, expects another number of nodes, or has other versions.
        """
        expected = range(1, self._world.size)
        deadline = time.monotonic() + timeout_seconds
        while len(self._peers) < len(expected):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                missing = ", ".join(self._world.describe(rank) for rank in expected if rank not in self._peers)
                untrusted = "".join(
                    f"; {address} did not prove that it knows {SECRET_VARIABLE}"
                    for address in self._untrusted_addresses
                )
                raise LaunchError(
                    f"only {len(self._peers) + 1} of {self._world.size} nodes connected to {self._world.host} within "
                    f"{timeout_seconds:g} s; missing: {missing}{untrusted}"
                ) from None
            if self._rejection is not None:
                raise self._rejection
        return [self._peers[rank] for rank in expected]

    @property
    def peers(self) -> list[Peer]:
        """The nodes that have connected so far, in order of arrival."""
        return list(self._peers.values())

    async def close(self) -> None:
        """Stop listening; existing connections stay open."""
        if self._server is not None:
            self._server.close()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            keys = await asyncio.wait_for(answer_node(reader, writer, self._world), ANSWER_TIMEOUT_SECONDS)
        except (TimeoutError, ConnectionLostError):
            await close_writer(writer)  # not a node of this job
            return
        connection = Connection(reader, writer, self._node_timeout, send_key=keys.head, receive_key=keys.node)
        try:
            hello = await asyncio.wait_for(connection.receive(), ANSWER_TIMEOUT_SECONDS)
        except (TimeoutError, ConnectionLostError):
            self._untrusted_addresses[connection.remote_address] = None
            await connection.close()
            return
        refused = Refused(reason=f"expected Hello, got {type(hello).__name__}", same_job=False)
        if isinstance(hello, Hello):
            peer = Peer(hello=hello, connection=connection, address=hello.address or connection.remote_address)
            reason = self._check_hello(peer)
            if reason is None:
                self._peers[hello.rank] = peer
                connection.send(Accepted())
                self._changed.set()
                return
            refused = reason
        connection.send(refused)
        await connection.close()

    def _check_hello(self, peer: Peer) -> Refused | None:
        hello, world = peer.hello, self._world
        if hello.rank in self._peers or not 0 < hello.rank < world.size:
            return Refused(reason=f"the run on {world.host} has no free rank {hello.rank}", same_job=False)
        problem = None
        if hello.size != world.size:
            problem = f"{peer} expects {hello.size} nodes, {world.host} (rank 0) expects {world.size}"
        for package, version in self._own_hello.versions.items():
            other = hello.versions.get(package)
            if other != version:
                problem = f"{peer} has {package} {other}, {world.host} (rank 0) has {version}: all nodes need the same"
        if problem is None:
            return None
        self._rejection = LaunchError(problem)
        self._changed.set()
        return Refused(reason=problem, same_job=True)


def find_addresses(peers: list[Peer], head_address: str | None) -> tuple[str, list[str]]:
    """Return the address of the head and the addresses of the peers, as reachable from the other nodes.

    The address of the head is the one at which its peers have reached it. A peer on the same machine has reached it
    through the loopback; its address is that of the head.

    Args:
        head_address: address of the head given by the user; None: not given.
    """
    found = [peer.connection.local_address for peer in peers]
    head = head_address or next((address for address in found if not is_loopback(address)), "127.0.0.1")
    return head, [peer.hello.address or (head if is_loopback(peer.address) else peer.address) for peer in peers]


async def find_head(
    world: NodeWorld, hello: Hello, *, join_timeout: float, node_timeout: float
) -> tuple[Connection, Welcome | End]:
    """Connect to the head of this node's run and wait for all nodes; return the connection and the head's answer.

    The answer is `End` if a node did not join.

    Raises:
        LaunchError: the head was not found, or refused this node.
    """
    deadline = time.monotonic() + join_timeout
    # try all hosts on the most likely port first: a name that does not resolve may take seconds
    candidates = [(host, port) for port in world.ports for host in world.head_hosts]
    last_error = ""
    untrusted: dict[str, None] = {}
    for host, port in itertools.cycle(candidates):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node {world.host} (rank {world.rank}) found no head within {join_timeout:g} s at "
                f"{' or '.join(world.head_hosts)}, ports {_format_ports(world.ports)}; "
                f"{''.join(f'{each}; ' for each in untrusted if each != last_error)}last error: {last_error}"
            )
        try:
            return await try_head(host, port, world, hello, node_timeout)
        except UntrustedHeadError as e:
            last_error = f"{host}:{port}: {e}"
            untrusted[last_error] = None
        except (OSError, TimeoutError, ConnectionLostError) as e:
            last_error = f"{host}:{port}: {e or 'no answer'}"
        if (host, port) == candidates[-1]:
            await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError(candidates)


async def try_head(
    host: str, port: int, world: NodeWorld, hello: Hello, node_timeout: float
) -> tuple[Connection, Welcome | End]:
    """Return the connection and the head's answer.

    Raises:
        OSError, TimeoutError, ConnectionLostError: the head of this job was not found there.
        LaunchError: the head of this job has refused this node.
    """
    connecting = asyncio.open_connection(host, port, family=socket.AF_INET)
    reader, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_SECONDS)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(close_writer, writer)
        keys = await asyncio.wait_for(authenticate_head(reader, writer, world), ANSWER_TIMEOUT_SECONDS)
        connection = Connection(reader, writer, node_timeout, send_key=keys.node, receive_key=keys.head)
        closing.pop_all()
        closing.push_async_callback(connection.close)
        connection.send(hello)
        answer = await asyncio.wait_for(connection.receive(), ANSWER_TIMEOUT_SECONDS)
        if isinstance(answer, Accepted):
            answer = await connection.receive()
        if isinstance(answer, Welcome | End):
            closing.pop_all()
            return connection, answer
    if not isinstance(answer, Refused):
        raise ConnectionLostError(f"unexpected {type(answer).__name__} from the head")
    raise LaunchError(answer.reason) if answer.same_job else OtherJobError(answer.reason)


def _format_ports(ports: tuple[int, ...]) -> str:
    return f"{ports[0]}" if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
