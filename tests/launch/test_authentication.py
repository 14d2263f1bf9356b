"""Tests of the mutual authentication of head and nodes, with real sockets on the loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from megarl.errors import LaunchError
from megarl.launch import authentication
from megarl.launch.authentication import authenticate_head, derive_ray_token
from megarl.launch.connection import ConnectionLostError, MessageTags
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import Accepted, Challenge, Greeting, Hello, Joined, Refused, Welcome, decode, encode
from megarl.launch.rendezvous import Rendezvous, find_head
from tests.launch.test_rendezvous import make_hello, make_world
from tests.time_limits import HANG_SECONDS

SECRET = "the secret of this run"
OTHER_SECRET = "the secret of somebody else"

JOIN_TIMEOUT = 1.0

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """Name of a job whose ports only this test uses."""
    return str(request.node.name)


@asynccontextmanager
async def real_head(job: str, **fields: object) -> AsyncIterator[tuple[Rendezvous, int]]:
    """Run the rendezvous of a head and yield it with its port."""
    world = make_world(0, job=job, **fields)
    rendezvous = Rendezvous(world, make_hello(world), HANG_SECONDS)
    port = await rendezvous.listen()
    try:
        yield rendezvous, port
    finally:
        for peer in rendezvous.peers:
            await peer.connection.close()
        await rendezvous.close()


@asynccontextmanager
async def false_head(job: str, handle: Handler) -> AsyncIterator[NodeWorld]:
    """Listen at the first port of the job; yield the world of a node that looks for its head there only."""
    port = make_world(1, job=job).ports[0]
    async with await asyncio.start_server(handle, "127.0.0.1", port):
        yield make_world(1, job=job, head_port=port)


def search(world: NodeWorld) -> Awaitable[object]:
    return find_head(world, make_hello(world), join_timeout=JOIN_TIMEOUT, node_timeout=HANG_SECONDS)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def read_to_end(reader: asyncio.StreamReader) -> list[bytes]:
    """Return the lines that arrive until the other end closes the connection."""
    return (await asyncio.wait_for(reader.read(), HANG_SECONDS)).splitlines(keepends=True)


async def require_no_peer(rendezvous: Rendezvous) -> None:
    with pytest.raises(
        LaunchError, match=r"missing: node n2 \(rank 1\); 127.0.0.1 did not prove that it knows MEGARL_"
    ):
        await rendezvous.wait_for_peers(0.3)
    assert rendezvous.peers == []


def test_false_head_is_named_and_gets_nothing_but_a_nonce(job: str) -> None:
    received: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readline())
        greeting = decode(received[-1])
        assert isinstance(greeting, Greeting)
        liar = make_world(0, job=job, secret=OTHER_SECRET)
        proof = authentication._derive_proof(liar, greeting.nonce, "0" * 64)
        writer.write(encode(Challenge(nonce="0" * 64, proof=proof)))
        received.extend(await read_to_end(reader))
        writer.close()

    async def main() -> None:
        async with false_head(job, handle) as node:
            with pytest.raises(LaunchError) as error:
                await search(node)
            assert str(error.value) == (
                f"node n2 (rank 1) found no head within {JOIN_TIMEOUT:g} s at 127.0.0.1, ports {node.ports[0]}; "
                f"last error: 127.0.0.1:{node.ports[0]}: the head there does not know this node's MEGARL_LAUNCH_SECRET"
            )

    asyncio.run(main())
    assert {decode(line).__class__ for line in received} == {Greeting}
    assert all(json.loads(line).keys() == {"kind", "job", "nonce"} for line in received)
    assert SECRET.encode() not in b"".join(received)


def test_node_finds_its_head_behind_a_false_one(job: str) -> None:
    async def main() -> None:
        # both heads have the same job; the false one listens on the first port
        async with real_head(job, secret=OTHER_SECRET), real_head(job) as (rendezvous, _):
            node = asyncio.create_task(search(make_world(1, job=job)))
            (peer,) = await rendezvous.wait_for_peers(HANG_SECONDS)
            peer.connection.send(Welcome(ray_address="a:1", node_address="b", ray_nonce="c"))
            await node

    asyncio.run(main())


@pytest.mark.parametrize("answer", [Accepted(), Joined(), Welcome(ray_address="a:1", node_address="b", ray_nonce="c")])
def test_head_that_skips_its_proof_is_refused(job: str, answer: Accepted | Joined | Welcome) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(answer))
        await reader.read()
        writer.close()

    async def main() -> None:
        async with false_head(job, handle) as node:
            with pytest.raises(LaunchError, match=f"last error: .*: expected Challenge, got {type(answer).__name__}$"):
                await search(node)

    asyncio.run(main())


def test_refusal_without_proof_does_not_end_the_search(job: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(Refused(reason="go away", same_job=True)))
        await reader.read()
        writer.close()

    async def main() -> None:
        async with false_head(job, handle) as node:
            with pytest.raises(LaunchError, match=r"found no head within .*: this is the head of another job$"):
                await search(node)

    asyncio.run(main())


def test_recorded_answer_of_the_head_is_refused(job: str) -> None:
    async def main() -> None:
        recorded: list[bytes] = []
        async with real_head(job) as (_, port):
            reader, writer = await connect(port)
            writer.write(encode(Greeting(job=make_world(1, job=job).job_id, nonce="1" * 64)))
            recorded.append(await reader.readline())
            writer.close()

        async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(recorded[0])
            await reader.read()
            writer.close()

        async with false_head(job, replay) as node:
            with pytest.raises(LaunchError, match="the head there does not know this node's MEGARL_LAUNCH_SECRET"):
                await search(node)

    asyncio.run(main())


def test_false_node_is_refused_and_named(job: str) -> None:
    async def main() -> None:
        async with real_head(job) as (rendezvous, port):
            reader, writer = await connect(port)
            node = make_world(1, job=job)
            writer.write(encode(Greeting(job=node.job_id, nonce="1" * 64)))
            challenge = decode(await reader.readline())
            assert isinstance(challenge, Challenge)
            keys = authentication._derive_keys(replace(node, secret=OTHER_SECRET), "1" * 64, challenge.nonce)
            writer.write(MessageTags(keys.node).add(encode(make_hello(node))))
            assert await read_to_end(reader) == []
            await require_no_peer(rendezvous)
            writer.close()

    asyncio.run(main())


def test_node_that_does_not_trust_the_head_is_named(job: str) -> None:
    async def main() -> None:
        async with real_head(job) as (rendezvous, _):
            with pytest.raises(LaunchError, match="the head there does not know this node's MEGARL_LAUNCH_SECRET"):
                await search(make_world(1, job=job, secret=OTHER_SECRET))
            await require_no_peer(rendezvous)

    asyncio.run(main())


def test_recorded_messages_of_a_node_are_refused(job: str) -> None:
    async def main() -> None:
        node = make_world(1, job=job)
        async with real_head(job) as (rendezvous, port):
            # the node's side of a successful exchange
            reader, writer = await connect(port)
            greeting = encode(Greeting(job=node.job_id, nonce="1" * 64))
            writer.write(greeting)
            challenge = decode(await reader.readline())
            assert isinstance(challenge, Challenge)
            tags = MessageTags(authentication._derive_keys(node, "1" * 64, challenge.nonce).node)
            hello = tags.add(encode(make_hello(node)))
            writer.write(hello)
            await rendezvous.wait_for_peers(HANG_SECONDS)
            writer.close()
        async with real_head(job) as (rendezvous, port):
            reader, writer = await connect(port)
            writer.write(greeting + hello)
            (second,) = await read_to_end(reader)
            assert decode(second) != challenge
            await require_no_peer(rendezvous)
            writer.close()

    asyncio.run(main())


def test_answer_of_the_head_is_no_proof_of_a_node(job: str) -> None:
    """Sending back what the head has sent must not authenticate anybody."""

    async def main() -> None:
        async with real_head(job) as (rendezvous, port):
            node = make_world(1, job=job)
            first_reader, first = await connect(port)
            first.write(encode(Greeting(job=node.job_id, nonce="1" * 64)))
            challenge_line = await first_reader.readline()
            challenge = decode(challenge_line)
            assert isinstance(challenge, Challenge)
            # the proof as a tag, the challenge itself, and the head's nonce as the challenge of another connection
            first.write(challenge.proof.encode() + b" " + encode(make_hello(node)))
            assert await read_to_end(first_reader) == []
            second_reader, second = await connect(port)
            second.write(encode(Greeting(job=node.job_id, nonce=challenge.nonce)) + challenge_line)
            assert len(await read_to_end(second_reader)) == 1
            await require_no_peer(rendezvous)
            for writer in (first, second):
                writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("early", ["Hello", "Joined"])
def test_node_that_skips_the_challenge_is_refused(job: str, early: str) -> None:
    async def main() -> None:
        async with real_head(job) as (rendezvous, port):
            reader, writer = await connect(port)
            writer.write(encode(make_hello(make_world(1, job=job)) if early == "Hello" else Joined()))
            assert await read_to_end(reader) == []
            assert rendezvous.peers == []
            writer.close()

    asyncio.run(main())


async def start_session(job: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, MessageTags]:
    reader, writer = await connect(port)
    keys = await authenticate_head(reader, writer, make_world(1, job=job))
    return reader, writer, MessageTags(keys.node)


def test_authenticated_node_that_starts_with_another_message_is_refused(job: str) -> None:
    async def main() -> None:
        async with real_head(job) as (rendezvous, port):
            reader, writer, tags = await start_session(job, port)
            writer.write(tags.add(encode(Joined())))
            (line,) = await read_to_end(reader)
            assert decode(line.partition(b" ")[2]) == Refused(reason="expected Hello, got Joined", same_job=False)
            assert rendezvous.peers == []
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("attack", ["repeated", "without a tag", "reordered", "changed"])
def test_forged_message_in_a_session_ends_it(job: str, attack: str) -> None:
    async def main() -> None:
        async with real_head(job) as (rendezvous, port):
            _, writer, tags = await start_session(job, port)
            hello = make_hello(make_world(1, job=job))
            line = tags.add(encode(hello))
            writer.write(line)
            (peer,) = await rendezvous.wait_for_peers(HANG_SECONDS)
            joined, later = tags.add(encode(Joined())), tags.add(encode(Joined()))
            attacks = {
                "repeated": line,
                "without a tag": encode(Joined()),
                "reordered": later,
                "changed": joined.replace(b"Joined", b"Accepted"),
            }
            writer.write(attacks[attack])
            with pytest.raises(ConnectionLostError, match="a message has a wrong authentication tag"):
                await peer.connection.receive()
            writer.close()

    asyncio.run(main())


def test_hello_with_fields_of_other_types_is_refused(job: str) -> None:
    async def main() -> None:
        async with real_head(job) as (rendezvous, port):
            reader, writer, tags = await start_session(job, port)
            hello: Hello = make_hello(make_world(1, job=job))
            writer.write(tags.add(encode(replace(hello, rank="1"))))  # type: ignore[arg-type]
            assert await read_to_end(reader) == []
            assert rendezvous.peers == []
            writer.close()

    asyncio.run(main())


def test_token_of_ray_depends_on_secret_job_and_start() -> None:
    head, node = make_world(0), make_world(1)
    tokens = {
        derive_ray_token(world, nonce)
        for world, nonce in (
            (head, "1"),
            (node, "1"),
            (head, "2"),
            (replace(head, secret=OTHER_SECRET), "1"),
            (replace(head, job="b"), "1"),
        )
    }
    assert len(tokens) == 4
    assert all(len(token) == 64 for token in tokens)
