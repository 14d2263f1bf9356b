"""Heads and nodes of a rendezvous in this process, with real sockets on the loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from megarl.cluster.launch.connection import Connection, End, Hello, Welcome
from megarl.cluster.launch.node_world import NodeWorld
from megarl.cluster.launch.rendezvous import Rendezvous, find_head
from tests.time_limits import HANG_SECONDS

SECRET = "the secret of this run"
current_job = "a"
"""Job of the worlds that tests make, from which their ports are derived."""
WELCOME = Welcome(ray_address="127.0.0.1:1", node_address="127.0.0.1", ray_nonce="0")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def make_world(rank: int, size: int = 2, **fields: Any) -> NodeWorld:
    usual: dict[str, Any] = {
        "job": current_job,
        "host": f"n{rank + 1}",
        "head_hosts": ("127.0.0.1",),
        "head_port": None,
        "secret": SECRET,
        "nodes": tuple(f"n{i + 1}" for i in range(size)),
    }
    return NodeWorld(rank=rank, size=size, **usual | fields)


def make_hello(world: NodeWorld, **versions: str) -> Hello:
    versions = {"megarl": "1", "ray": "2"} | versions
    return Hello(rank=world.rank, size=world.size, host=world.host, address=None, versions=versions)


@asynccontextmanager
async def listening_head(world: NodeWorld) -> AsyncIterator[tuple[Rendezvous, int]]:
    """Run the rendezvous of a head; yield it with its port."""
    rendezvous = Rendezvous(world, make_hello(world), HANG_SECONDS)
    port = await rendezvous.listen()
    try:
        yield rendezvous, port
    finally:
        for peer in rendezvous.peers:
            await peer.connection.close()
        await rendezvous.close()


@asynccontextmanager
async def listening_server(handle: Handler) -> AsyncIterator[int]:
    """Handle connections at a free port; yield it."""
    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def run_worker(world: NodeWorld, join_timeout=HANG_SECONDS, **versions) -> tuple[Connection, Welcome | End]:
    """Find the head and return its answer."""
    hello = make_hello(world, **versions)
    return await find_head(world, hello, join_timeout=join_timeout, node_timeout=HANG_SECONDS)


async def read_to_end(reader: asyncio.StreamReader) -> list[bytes]:
    """Return the lines that arrive until the other end closes the connection."""
    try:
        return (await asyncio.wait_for(reader.read(), HANG_SECONDS)).splitlines(keepends=True)
    except ConnectionResetError:  # it was closed while data was under way
        return []
