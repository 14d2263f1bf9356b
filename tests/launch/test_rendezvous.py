"""Tests of the rendezvous of nodes, with real sockets on the loopback."""

import asyncio
import json
import socket
import time
from dataclasses import replace

import pytest

from megarl.errors import LaunchError
from megarl.launch import rendezvous
from megarl.launch.authentication import authenticate_head
from megarl.launch.connection import ConnectionLostError, MessageTags
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import End, Heartbeat, Hello, Joined, Welcome, decode, encode
from megarl.launch.rendezvous import Peer, Rendezvous, find_addresses, find_head
from tests.time_limits import HANG_SECONDS

WELCOME = Welcome(ray_address="127.0.0.1:1", node_address="127.0.0.1", ray_nonce="0")


def make_world(rank, size=2, job="a", **fields):
    return NodeWorld(
        **{
            "rank": rank,
            "size": size,
            "host": f"n{rank + 1}",
            "head_hosts": ("127.0.0.1",),
            "head_port": None,
            "job": job,
            "secret": "the secret of this run",
        }
        | {"nodes": tuple(f"n{i + 1}" for i in range(size))}
        | fields
    )


def make_hello(world, **versions):
    versions = {"megarl": "1", "ray": "2"} | versions
    return Hello(rank=world.rank, size=world.size, host=world.host, address=None, versions=versions)


async def run_head(world, timeout=HANG_SECONDS):
    """Run the head's side; welcome all peers and return them."""
    rendezvous = Rendezvous(world, make_hello(world), HANG_SECONDS)
    await rendezvous.listen()
    try:
        peers = await rendezvous.wait_for_peers(timeout)
    except LaunchError as error:
        for peer in rendezvous.peers:
            peer.connection.send(End(1, str(error)))
        raise
    finally:
        await rendezvous.close()
    for peer in peers:
        peer.connection.send(WELCOME)
    return peers


def run_worker(world, join_timeout=HANG_SECONDS, node_timeout=HANG_SECONDS, **versions):
    return find_head(world, make_hello(world, **versions), join_timeout=join_timeout, node_timeout=node_timeout)


@pytest.fixture
def job(request):
    """Name of a job whose ports only this test uses."""
    return request.node.name


def listener(port):
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


def test_peers_are_ordered_by_rank(job):
    async def main():
        peers, *_, (connection, welcome) = await asyncio.gather(
            run_head(make_world(0, 3, job)), run_worker(make_world(2, 3, job)), run_worker(make_world(1, 3, job))
        )
        assert [peer.hello.host for peer in peers] == ["n2", "n3"]
        assert welcome == WELCOME
        connection.send(Joined())
        assert await peers[0].connection.receive() == Joined()
        assert str(peers[1]) == "node n3 (127.0.0.1, rank 2)"

    asyncio.run(main())


def test_late_head_is_found(job):
    async def main():
        worker = asyncio.create_task(run_worker(make_world(1, job=job)))
        await asyncio.sleep(0.3)
        await asyncio.gather(run_head(make_world(0, job=job)), worker)

    asyncio.run(main())


def test_head_uses_the_next_port_if_one_is_taken(job, monkeypatch):
    # on the first port nobody answers; on the second the connection is closed at once
    monkeypatch.setattr(rendezvous, "ANSWER_TIMEOUT_SECONDS", 1.0)
    head = make_world(0, job=job)

    async def main():
        async def hang_up(reader, writer):
            writer.close()

        other_server = await asyncio.start_server(hang_up, "127.0.0.1", head.ports[1])
        with listener(head.ports[0]):
            peers, _ = await asyncio.gather(run_head(head), run_worker(make_world(1, job=job)))
        other_server.close()
        assert peers[0].connection.local_address == "127.0.0.1"

    asyncio.run(main())


def test_error_if_all_ports_are_taken(job):
    head = make_world(0, job=job)
    sockets = [listener(port) for port in head.ports]
    try:
        with pytest.raises(LaunchError, match=f"node n1 needs a free port among {head.ports[0]}-{head.ports[-1]}"):
            asyncio.run(run_head(head))
    finally:
        for taken in sockets:
            taken.close()


def test_two_jobs_with_the_same_ports(job, monkeypatch):
    # both nodes try both heads, and recognize their own by the job
    ports = make_world(0, job=job).ports
    monkeypatch.setattr(NodeWorld, "ports", ports)
    ours, theirs = job, job + " of others"

    async def main():
        heads = asyncio.gather(run_head(make_world(0, job=ours)), run_head(make_world(0, job=theirs)))
        nodes = asyncio.gather(
            run_worker(make_world(1, job=theirs, host="theirs")), run_worker(make_world(1, job=ours, host="ours"))
        )
        (mine,), (other,) = await heads
        await nodes
        assert (mine.hello.host, other.hello.host) == ("ours", "theirs")

    asyncio.run(main())


def peer(rank, found, came, address=None):
    class AtAddress:
        local_address = found
        remote_address = came

    return Peer(
        hello=replace(make_hello(make_world(rank, 4)), address=address), connection=AtAddress(), address=address or came
    )


def test_head_address_is_the_one_other_machines_used():
    here, there = peer(1, "127.0.0.1", "127.0.0.1"), peer(2, "10.0.0.1", "10.0.0.3")
    assert find_addresses([here, there], None) == ("10.0.0.1", ["10.0.0.1", "10.0.0.3"])
    assert find_addresses([here], None) == ("127.0.0.1", ["127.0.0.1"])
    assert find_addresses([], None) == ("127.0.0.1", [])


def test_addresses_given_by_the_user_take_precedence():
    named = peer(1, "10.0.0.1", "10.0.0.2", address="192.168.0.2")
    assert find_addresses([named], "192.168.0.1") == ("192.168.0.1", ["192.168.0.2"])


def test_missing_node_is_named(job):
    async def main():
        worker = asyncio.create_task(run_worker(make_world(1, 3, job)))
        with pytest.raises(
            LaunchError, match=r"only 2 of 3 nodes connected to n1 within 2 s; missing: node n3 \(rank 2\)$"
        ):
            await run_head(make_world(0, 3, job), 2.0)
        worker.cancel()

    asyncio.run(main())


def test_error_if_no_head_is_found(job):
    node = make_world(1, job=job)
    with pytest.raises(
        LaunchError, match=rf"node n2 \(rank 1\) found no head within 0.4 s at 127.0.0.1, ports {node.ports[0]}-"
    ):
        asyncio.run(run_worker(node, join_timeout=0.4))


def test_unresolvable_head_name_is_skipped(job):
    async def main():
        node = make_world(1, job=job, head_hosts=("no-such-host.invalid", "127.0.0.1"))
        await asyncio.gather(run_head(make_world(0, job=job)), run_worker(node))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("versions", "size", "message"),
    [
        ({"ray": "3"}, 2, r"node n2 \(127.0.0.1, rank 1\) has ray 3, n1 \(rank 0\) has 2: all nodes need the same"),
        ({}, 3, r"node n2 \(127.0.0.1, rank 1\) expects 3 nodes, n1 \(rank 0\) expects 2"),
    ],
)
def test_mismatched_nodes_are_rejected(job, versions, size, message):
    async def main():
        worker = asyncio.create_task(run_worker(make_world(1, size, job), **versions))
        with pytest.raises(LaunchError, match=message):
            await run_head(make_world(0, job=job))
        with pytest.raises(LaunchError, match=message):
            await worker

    asyncio.run(main())


def test_node_with_a_taken_rank_keeps_searching(job):
    async def main():
        twice = asyncio.gather(*(run_worker(make_world(1, 3, job), 3.0) for _ in range(2)), return_exceptions=True)
        with pytest.raises(LaunchError, match=r"missing: node n3"):
            await run_head(make_world(0, 3, job), 2.0)
        accepted, refused = sorted(await twice, key=lambda answer: isinstance(answer, LaunchError))
        assert isinstance(accepted[1], End)
        assert "found no head" in str(refused)

    asyncio.run(main())


def test_silent_node_is_lost(job):
    async def main():
        head = make_world(0, job=job)
        rendezvous = Rendezvous(head, make_hello(head), 0.4)
        port = await rendezvous.listen()
        node = make_world(1, job=job)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        keys = await authenticate_head(reader, writer, node)
        writer.write(MessageTags(keys.node).add(encode(make_hello(node))))
        (peer,) = await rendezvous.wait_for_peers(HANG_SECONDS)
        started = time.monotonic()
        with pytest.raises(ConnectionLostError, match=r"no message for 0.4 s"):
            await peer.connection.receive()
        assert time.monotonic() - started > 0.3
        writer.close()
        await peer.connection.close()
        await rendezvous.close()

    asyncio.run(main())


def test_heartbeats_keep_an_idle_connection_open(job):
    async def main():
        head = make_world(0, job=job)
        rendezvous = Rendezvous(head, make_hello(head), 1.0)
        await rendezvous.listen()
        worker = asyncio.create_task(run_worker(make_world(1, job=job), node_timeout=1.0))
        (peer,) = await rendezvous.wait_for_peers(HANG_SECONDS)
        await asyncio.sleep(1.5)
        peer.connection.send(WELCOME)
        connection, _ = await worker
        quiet = asyncio.create_task(peer.connection.receive())
        await asyncio.sleep(1.5)
        assert not quiet.done()
        await connection.close()
        with pytest.raises(ConnectionLostError, match="the connection was closed unexpectedly"):
            await quiet
        await rendezvous.close()

    asyncio.run(main())


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
def test_connection_with_invalid_messages_is_closed(job, line):
    async def main():
        head = make_world(0, job=job)
        rendezvous = Rendezvous(head, make_hello(head), HANG_SECONDS)
        port = await rendezvous.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line)
        answer = await asyncio.wait_for(reader.read(), HANG_SECONDS)
        assert answer == b""
        peers, _ = await asyncio.gather(
            rendezvous.wait_for_peers(HANG_SECONDS), answered(rendezvous, make_world(1, job=job))
        )
        assert len(peers) == 1
        writer.close()
        await rendezvous.close()

    async def answered(rendezvous, node):
        task = asyncio.create_task(run_worker(node))
        while not rendezvous.peers:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())


def test_messages_roundtrip():
    for message in (WELCOME, Heartbeat(), make_hello(make_world(1))):
        line = encode(message)
        assert line.endswith(b"\n")
        assert decode(line) == message
    assert json.loads(encode(Heartbeat())) == {"kind": "Heartbeat"}
