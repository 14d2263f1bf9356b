"""Tests of the rendezvous of nodes, with real sockets on the loopback."""

import asyncio
import contextlib
import json
import socket
from dataclasses import replace

import pytest

from megarl.cluster.launch import connection, rendezvous
from megarl.cluster.launch.connection import ConnectionLostError, End, Heartbeat, Joined, decode, encode
from megarl.cluster.launch.node_world import NodeWorld
from megarl.cluster.launch.rendezvous import Peer, find_addresses
from megarl.errors import LaunchError
from tests.cluster.launch.in_process import WELCOME, listening_head, make_hello, make_world, read_to_end, run_worker
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, wait_for

pytestmark = pytest.mark.usefixtures("own_ports")


async def run_head(world):
    """Run the head's side; welcome all peers and return them."""
    async with listening_head(world) as (rendezvous, _):
        try:
            peers = await rendezvous.wait_for_peers(HANG_SECONDS)
        except LaunchError as error:
            for peer in rendezvous.peers:
                peer.connection.send(End(1, str(error)))
            raise
        for peer in peers:
            peer.connection.send(WELCOME)
        return peers


def bind(port):
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError):  # another process listens there already
        taken.bind(("127.0.0.1", port))
        taken.listen()
    return taken


async def test_peers_are_ordered_by_rank():
    async with listening_head(make_world(0, 3)) as (head, _):
        workers = asyncio.gather(run_worker(make_world(2, 3)), run_worker(make_world(1, 3)))
        peers = await head.wait_for_peers(HANG_SECONDS)
        assert [peer.hello.host for peer in peers] == ["n2", "n3"]
        assert str(peers[1]) == "node n3 (127.0.0.1, rank 2)"
        for peer in peers:
            peer.connection.send(WELCOME)
        *_, (of_worker, welcome) = await workers
        assert welcome == WELCOME
        of_worker.send(Joined())
        assert await peers[0].connection.receive() == Joined()


async def test_late_head_is_found(monkeypatch):
    tried, try_head = [], rendezvous.try_head

    def record(*arguments):
        tried.append(arguments)
        return try_head(*arguments)

    monkeypatch.setattr(rendezvous, "try_head", record)
    worker = asyncio.create_task(run_worker(make_world(1)))
    await wait_for(lambda: len(tried) > len(make_world(1).ports))
    await asyncio.gather(run_head(make_world(0)), worker)


async def test_head_uses_the_next_port_if_one_is_taken(monkeypatch):
    # on the first port nobody answers; on the second the connection is closed at once
    monkeypatch.setattr(rendezvous, "ANSWER_TIMEOUT_SECONDS", 0.3)
    head = make_world(0)

    async def hang_up(reader, writer):
        rendezvous.ANSWER_TIMEOUT_SECONDS = HANG_SECONDS
        writer.close()

    with bind(head.ports[0]):
        async with await asyncio.start_server(hang_up, "127.0.0.1", head.ports[1]):
            peers, _ = await asyncio.gather(run_head(head), run_worker(make_world(1)))
    assert peers[0].connection.local_address == "127.0.0.1"


async def test_error_if_all_ports_are_taken():
    head = make_world(0)
    with contextlib.ExitStack() as stack:
        for port in head.ports:
            stack.enter_context(bind(port))
        with pytest.raises(LaunchError, match=f"node n1 needs a free port among {head.ports[0]}-{head.ports[-1]}"):
            await run_head(head)


async def test_two_jobs_with_the_same_ports(monkeypatch):
    # both nodes try both heads, and recognize their own by the job
    monkeypatch.setattr(NodeWorld, "ports", make_world(0).ports)
    ours, theirs = "ours", "theirs"
    heads = asyncio.gather(run_head(make_world(0, job=ours)), run_head(make_world(0, job=theirs)))
    nodes = asyncio.gather(
        run_worker(make_world(1, job=theirs, host="theirs")), run_worker(make_world(1, job=ours, host="ours"))
    )
    (mine,), (other,) = await heads
    await nodes
    assert (mine.hello.host, other.hello.host) == ("ours", "theirs")


def peer(rank, found, came, address=None):
    class AtAddress:
        local_address = found
        remote_address = came

    hello = replace(make_hello(make_world(rank, 4)), address=address)
    return Peer(hello=hello, connection=AtAddress(), address=address or came)


@pytest.mark.parametrize(
    ("peers", "given", "found"),
    [
        # the address that other machines used
        ([(1, "127.0.0.1", "127.0.0.1"), (2, "10.0.0.1", "10.0.0.3")], None, ("10.0.0.1", ["10.0.0.1", "10.0.0.3"])),
        ([(1, "127.0.0.1", "127.0.0.1")], None, ("127.0.0.1", ["127.0.0.1"])),
        ([], None, ("127.0.0.1", [])),
        # addresses that the user has given
        ([(1, "10.0.0.1", "10.0.0.2", "192.168.0.2")], "192.168.0.1", ("192.168.0.1", ["192.168.0.2"])),
    ],
)
def test_addresses_of_head_and_peers(peers, given, found):
    assert find_addresses([peer(*each) for each in peers], given) == found


async def test_missing_node_is_named():
    async with listening_head(make_world(0, 3)) as (head, _):
        worker = asyncio.create_task(run_worker(make_world(1, 3)))
        await wait_for(lambda: head.peers)
        with expect_error(LaunchError, "2 of 3", "n1", "0 s", "node n3 (rank 2)"):
            await head.wait_for_peers(0.0)
        worker.cancel()


@pytest.mark.usefixtures("tries")
async def test_error_if_no_head_is_found():
    node = make_world(1)
    with expect_error(LaunchError, "node n2 (rank 1)", "20 s", "127.0.0.1", f"{node.ports[0]}-", "last error: 127"):
        await run_worker(node, join_timeout=20)


async def test_unresolvable_head_name_is_skipped():
    node = make_world(1, head_hosts=("no-such-host.invalid", "127.0.0.1"))
    await asyncio.gather(run_head(make_world(0)), run_worker(node))


@pytest.mark.parametrize(
    ("versions", "size", "message"),
    [
        ({"ray": "3"}, 2, r"node n2 \(127.0.0.1, rank 1\) has ray 3, n1 \(rank 0\) has 2: all nodes need the same"),
        ({}, 3, r"node n2 \(127.0.0.1, rank 1\) expects 3 nodes, n1 \(rank 0\) expects 2"),
    ],
)
async def test_mismatched_nodes_are_rejected(versions, size, message):
    worker = asyncio.create_task(run_worker(make_world(1, size), **versions))
    with pytest.raises(LaunchError, match=message):
        await run_head(make_world(0))
    with pytest.raises(LaunchError, match=message):
        await worker


@pytest.mark.usefixtures("tries")
async def test_node_with_a_taken_rank_keeps_searching():
    async with listening_head(make_world(0, 3)) as (head, port):
        node = make_world(1, 3, head_port=port)
        accepted = asyncio.create_task(run_worker(node))
        await wait_for(lambda: head.peers)
        with expect_error(LaunchError, "2", "n1", "1", "within", "found"):
            await run_worker(node, join_timeout=2)
        assert len(head.peers) == 1
        head.peers[0].connection.send(End(1, None))
        assert (await accepted)[1] == End(1, None)


async def test_silent_node_is_lost(clock, monkeypatch):
    monkeypatch.setattr(connection, "MAX_HEARTBEAT_INTERVAL_SECONDS", 10 * HANG_SECONDS)
    monkeypatch.setattr(connection, "HEARTBEATS_PER_TIMEOUT", 0.1)
    async with listening_head(make_world(0)) as (head, _):
        worker = asyncio.create_task(run_worker(make_world(1)))
        (peer,) = await head.wait_for_peers(HANG_SECONDS)
        receiving = asyncio.create_task(peer.connection.receive())
        await asyncio.sleep(0)
        assert not receiving.done()
        clock.offset = HANG_SECONDS + 1
        with pytest.raises(ConnectionLostError, match=f"no message for {HANG_SECONDS:g} s"):
            await receiving
        worker.cancel()


async def test_heartbeats_keep_an_idle_connection_open(clock, monkeypatch):
    heartbeats, read_message = [], connection.read_message

    async def record(reader, tags=None):
        message = await read_message(reader, tags)
        heartbeats.extend([message] if isinstance(message, Heartbeat) else [])
        return message

    monkeypatch.setattr(connection, "read_message", record)

    async def stay_idle(receiver):
        """Let twice the time limit pass, in parts that are shorter than it."""
        for _ in range(8):
            count = len(heartbeats)
            clock.offset += HANG_SECONDS / 4
            await wait_for(lambda: len(heartbeats) > count or receiver.done())  # noqa: B023 -- awaited in the loop
            assert not receiver.done()

    async with listening_head(make_world(0)) as (head, _):
        worker = asyncio.create_task(run_worker(make_world(1)))
        (peer,) = await head.wait_for_peers(HANG_SECONDS)
        await stay_idle(worker)
        peer.connection.send(WELCOME)
        of_worker, _ = await worker
        quiet = asyncio.create_task(peer.connection.receive())
        await stay_idle(quiet)
        await of_worker.close()
        with expect_error(ConnectionLostError, "unexpectedly", "connection"):
            await quiet


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b"{}\n",
        b'{"kind": "Greeting"}\n',
        b'{"kind": "Greeting", "job": 1, "nonce": []}\n',
        b'{"kind": "Heartbeat"}\n',
        b"[]\n",
        b"\xff\n",
        b"x" * 200_000,
        b"[" * 60_000 + b"\n",
        b'{"kind": "Greeting", "job": "\\ud800", "nonce": ""}\n',
    ],
)
async def test_connection_with_invalid_messages_is_closed(line):
    async with listening_head(make_world(0)) as (head, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line)
        assert await read_to_end(reader) == []
        worker = asyncio.create_task(run_worker(make_world(1)))
        assert len(await head.wait_for_peers(HANG_SECONDS)) == 1
        worker.cancel()
        writer.close()


def test_messages_roundtrip():
    for message in (WELCOME, Heartbeat(), make_hello(make_world(1))):
        line = encode(message)
        assert line.endswith(b"\n")
        assert decode(line) == message
    assert json.loads(encode(Heartbeat())) == {"kind": "Heartbeat"}
