"""Over real sockets on the loopback."""

import asyncio
import json
import socket
import time
from dataclasses import replace

import pytest

from megarl.errors import LaunchError
from megarl.launch import rendezvous
from megarl.launch.connection import LinkLostError
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import Beat, End, Hello, Joined, Welcome, decode, encode
from megarl.launch.rendezvous import Meeting, Peer, addresses, find_head

WELCOME = Welcome(ray_address="127.0.0.1:1", node_address="127.0.0.1")


def world(rank, size=2, job="a", **fields):
    return NodeWorld(
        **{
            "rank": rank,
            "size": size,
            "host": f"n{rank + 1}",
            "head_hosts": ("127.0.0.1",),
            "head_port": None,
            "job": job,
        }
        | {"nodes": tuple(f"n{i + 1}" for i in range(size))}
        | fields
    )


def hello(world, **versions):
    versions = {"megarl": "1", "ray": "2"} | versions
    return Hello(token=world.token, rank=world.rank, size=world.size, host=world.host, address=None, versions=versions)


async def lead(world, timeout=5.0):
    """The peers, each of which is welcomed."""
    meeting = Meeting(world, hello(world), 5.0)
    await meeting.open()
    try:
        peers = await meeting.gather(timeout)
    except LaunchError as error:
        for peer in meeting.peers:
            peer.link.send(End(1, str(error)))
        raise
    finally:
        await meeting.close()
    for peer in peers:
        peer.link.send(WELCOME)
    return peers


def follow(world, join_timeout=5.0, node_timeout=5.0, **versions):
    return find_head(world, hello(world, **versions), join_timeout=join_timeout, node_timeout=node_timeout)


@pytest.fixture
def job(request):
    """A job whose ports nobody uses but this test."""
    return request.node.name


def listener(port):
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


def test_nodes_meet_in_order_of_rank(job):
    async def main():
        peers, *_, (link, welcome) = await asyncio.gather(
            lead(world(0, 3, job)), follow(world(2, 3, job)), follow(world(1, 3, job))
        )
        assert [peer.hello.host for peer in peers] == ["n2", "n3"]
        assert welcome == WELCOME
        link.send(Joined())
        assert await peers[0].link.receive() == Joined()
        assert str(peers[1]) == "node n3 (127.0.0.1, rank 2)"

    asyncio.run(main())


def test_late_head_is_found(job):
    async def main():
        follower = asyncio.create_task(follow(world(1, job=job)))
        await asyncio.sleep(0.3)
        await asyncio.gather(lead(world(0, job=job)), follower)

    asyncio.run(main())


def test_taken_ports_lead_to_the_next(job, monkeypatch):
    # nobody answers at the first; somebody who hangs up at once at the second
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 1.0)
    head = world(0, job=job)

    async def main():
        async def hang_up(reader, writer):
            writer.close()

        rude = await asyncio.start_server(hang_up, "127.0.0.1", head.ports[1])
        with listener(head.ports[0]):
            started = time.monotonic()
            peers, _ = await asyncio.gather(lead(head, 20.0), follow(world(1, job=job), 20.0))
            assert time.monotonic() - started < 15
        rude.close()
        assert peers[0].link.local_address == "127.0.0.1"

    asyncio.run(main())


def test_all_ports_taken(job):
    head = world(0, job=job)
    sockets = [listener(port) for port in head.ports]
    try:
        with pytest.raises(LaunchError, match=f"node n1 needs a free port among {head.ports[0]}-{head.ports[-1]}"):
            asyncio.run(lead(head))
    finally:
        for taken in sockets:
            taken.close()


def test_two_jobs_at_the_same_ports(job, monkeypatch):
    # both heads are tried by both nodes, and the token tells whose is whose
    ports = world(0, job=job).ports
    monkeypatch.setattr(NodeWorld, "ports", ports)
    ours, theirs = job, job + " of others"

    async def main():
        heads = asyncio.gather(lead(world(0, job=ours)), lead(world(0, job=theirs)))
        nodes = asyncio.gather(follow(world(1, job=theirs, host="theirs")), follow(world(1, job=ours, host="ours")))
        (mine,), (other,) = await heads
        await nodes
        assert (mine.hello.host, other.hello.host) == ("ours", "theirs")

    asyncio.run(main())


def peer(rank, found, came, address=None):
    class AtAddress:
        local_address = found
        remote_address = came

    return Peer(hello=replace(hello(world(rank, 4)), address=address), link=AtAddress(), address=address or came)


def test_head_is_where_other_machines_found_it():
    here, there = peer(1, "127.0.0.1", "127.0.0.1"), peer(2, "10.0.0.1", "10.0.0.3")
    assert addresses([here, there], None) == ("10.0.0.1", ["10.0.0.1", "10.0.0.3"])
    assert addresses([here], None) == ("127.0.0.1", ["127.0.0.1"])
    assert addresses([], None) == ("127.0.0.1", [])


def test_users_addresses_come_first():
    named = peer(1, "10.0.0.1", "10.0.0.2", address="192.168.0.2")
    assert addresses([named], "192.168.0.1") == ("192.168.0.1", ["192.168.0.2"])


def test_missing_node_is_named(job):
    async def main():
        follower = asyncio.create_task(follow(world(1, 3, job)))
        with pytest.raises(LaunchError, match=r"of 3 nodes, 2 met on n1 within 0.5 s; not there: node n3 \(rank 2\)$"):
            await lead(world(0, 3, job), 0.5)
        follower.cancel()

    asyncio.run(main())


def test_no_head(job):
    node = world(1, job=job)
    with pytest.raises(
        LaunchError, match=rf"node n2 \(rank 1\) found no head within 0.4 s, at 127.0.0.1, ports {node.ports[0]}-"
    ):
        asyncio.run(follow(node, join_timeout=0.4))


def test_head_whose_first_name_does_not_resolve(job):
    async def main():
        node = world(1, job=job, head_hosts=("no-such-host.invalid", "127.0.0.1"))
        await asyncio.gather(lead(world(0, job=job), 20.0), follow(node, 20.0))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("versions", "size", "message"),
    [
        ({"ray": "3"}, 2, r"node n2 \(127.0.0.1, rank 1\) has ray 3, n1 \(rank 0\) has 2: all nodes need the same"),
        ({}, 3, r"node n2 \(127.0.0.1, rank 1\) was told of 3 nodes, n1 \(rank 0\) of 2"),
    ],
)
def test_nodes_that_differ(job, versions, size, message):
    async def main():
        follower = asyncio.create_task(follow(world(1, size, job), **versions))
        with pytest.raises(LaunchError, match=message):
            await lead(world(0, job=job))
        with pytest.raises(LaunchError, match=message):
            await follower

    asyncio.run(main())


def test_rank_that_is_taken_waits_for_its_own_run(job):
    async def main():
        twice = asyncio.gather(*(follow(world(1, 3, job), 1.0) for _ in range(2)), return_exceptions=True)
        with pytest.raises(LaunchError, match=r"not there: node n3"):
            await lead(world(0, 3, job), 0.8)
        told, turned_away = sorted(await twice, key=lambda answer: isinstance(answer, LaunchError))
        assert isinstance(told[1], End)
        assert "found no head" in str(turned_away)

    asyncio.run(main())


def test_silent_node_is_noticed(job):
    async def main():
        head = world(0, job=job)
        meeting = Meeting(head, hello(head), 0.4)
        port = await meeting.open()
        with socket.create_connection(("127.0.0.1", port)) as mute:
            mute.sendall(encode(hello(world(1, job=job))))
            (peer,) = await meeting.gather(5.0)
            started = time.monotonic()
            with pytest.raises(LinkLostError, match=r"not heard of for 0.4 s"):
                await peer.link.receive()
            assert 0.3 < time.monotonic() - started < 2
        await peer.link.close()
        await meeting.close()

    asyncio.run(main())


def test_beats_keep_a_quiet_connection(job):
    async def main():
        head = world(0, job=job)
        meeting = Meeting(head, hello(head), 0.4)
        await meeting.open()
        follower = asyncio.create_task(follow(world(1, job=job), node_timeout=0.4))
        (peer,) = await meeting.gather(5.0)
        await asyncio.sleep(0.8)
        peer.link.send(WELCOME)
        link, _ = await follower
        quiet = asyncio.create_task(peer.link.receive())
        await asyncio.sleep(0.8)
        assert not quiet.done()
        await link.close()
        with pytest.raises(LinkLostError, match="it ended without a word"):
            await quiet
        await meeting.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n", b"{}\n", b'{"kind": "Hello"}\n', b"[]\n", b"\xff\n", b"x" * 200_000]
)
def test_whoever_does_not_speak_for_megarl_is_left(job, line):
    async def main():
        head = world(0, job=job)
        meeting = Meeting(head, hello(head), 5.0)
        port = await meeting.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line)
        answer = await asyncio.wait_for(reader.read(), 5.0)
        assert answer == b""
        peers, _ = await asyncio.gather(meeting.gather(5.0), answered(meeting, world(1, job=job)))
        assert len(peers) == 1
        writer.close()
        await meeting.close()

    async def answered(meeting, node):
        task = asyncio.create_task(follow(node))
        while not meeting.peers:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())


def test_messages_survive_the_wire():
    for message in (WELCOME, Beat(), hello(world(1))):
        line = encode(message)
        assert line.endswith(b"\n")
        assert decode(line) == message
    assert json.loads(encode(Beat())) == {"kind": "Beat"}
