"""Tests of the mutual authentication of head and nodes, with real sockets on the loopback."""

import asyncio
import json
from dataclasses import replace

import pytest

from megarl.cluster.launch import connection
from megarl.cluster.launch.connection import (
    Accepted,
    Challenge,
    ConnectionLostError,
    Greeting,
    Joined,
    MessageTags,
    Refused,
    authenticate_head,
    decode,
    derive_ray_token,
    encode,
)
from megarl.cluster.launch.node_world import NodeWorld
from megarl.cluster.launch.rendezvous import Rendezvous
from megarl.errors import LaunchError
from tests.cluster.launch.in_process import (
    SECRET,
    WELCOME,
    listening_head,
    listening_server,
    make_hello,
    make_world,
    read_to_end,
    run_worker,
)
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("own_ports", "tries")
OTHER_SECRET = "the secret of somebody else"
NONCE = "1" * 64


async def search(world: NodeWorld) -> None:
    """Try the only address of the head once, which fails."""
    await run_worker(world, join_timeout=1)


async def find_no_head(answer: bytes, message: str) -> None:
    """Assert that a node refuses a head that sends `answer`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()
        writer.close()

    async with listening_server(handle) as port:
        with pytest.raises(LaunchError, match=message):
            await search(make_world(1, head_port=port))


async def greet(port: int, nonce: str = NONCE) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes, Challenge]:
    """Send the first message of a node; return the connection and the head's answer, as line and decoded."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encode(Greeting(job=make_world(1).job_id, nonce=nonce)))
    line = await reader.readline()
    challenge = decode(line)
    assert isinstance(challenge, Challenge)
    return reader, writer, line, challenge


async def require_no_peer(rendezvous: Rendezvous) -> None:
    """Wait until the head says which address did not prove that it knows the secret."""
    named = "missing: node n2 (rank 1); 127.0.0.1 did not prove that it knows MEGARL_LAUNCH_SECRET"
    message = ""
    async with asyncio.timeout(HANG_SECONDS):
        while named not in message:
            with pytest.raises(LaunchError) as error:
                await rendezvous.wait_for_peers(0.0)
            message = str(error.value)
            await asyncio.sleep(0.01)
    assert rendezvous.peers == []


async def test_false_head_is_named_and_gets_nothing_but_a_nonce():
    received: list[bytes] = []

    async def handle(reader, writer):
        received.append(await reader.readline())
        greeting = decode(received[-1])
        assert isinstance(greeting, Greeting)
        liar = make_world(0, secret=OTHER_SECRET)
        proof = connection.derive_proof(liar, greeting.nonce, "0" * 64)
        writer.write(encode(Challenge(nonce="0" * 64, proof=proof)))
        received.extend(await read_to_end(reader))
        writer.close()

    async with listening_server(handle) as port:
        with pytest.raises(LaunchError) as error:
            await search(make_world(1, head_port=port))
        assert str(error.value) == (
            f"node n2 (rank 1) found no head within 1 s at 127.0.0.1, ports {port}; "
            f"last error: 127.0.0.1:{port}: the head there does not know this node's MEGARL_LAUNCH_SECRET"
        )
    assert {decode(line).__class__ for line in received} == {Greeting}
    assert all(json.loads(line).keys() == {"kind", "job", "nonce"} for line in received)
    assert SECRET.encode() not in b"".join(received)


async def test_node_finds_its_head_behind_a_false_one():
    # both heads have the same job; the false one listens on the first port
    async with listening_head(make_world(0, secret=OTHER_SECRET)), listening_head(make_world(0)) as (rendezvous, _):
        node = asyncio.create_task(run_worker(make_world(1)))
        (peer,) = await rendezvous.wait_for_peers(HANG_SECONDS)
        peer.connection.send(WELCOME)
        assert (await node)[1] == WELCOME


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        # a head that skips its proof
        (Accepted(), "last error: .*: expected Challenge, got Accepted$"),
        (Joined(), "last error: .*: expected Challenge, got Joined$"),
        (WELCOME, "last error: .*: expected Challenge, got Welcome$"),
        # a refusal without a proof does not end the search
        (Refused(reason="go away", same_job=True), r"found no head within .*: this is the head of another job$"),
    ],
)
async def test_answer_without_proof_is_refused(answer, message):
    await find_no_head(encode(answer), message)


async def test_recorded_answer_of_the_head_is_refused():
    async with listening_head(make_world(0)) as (_, port):
        _, writer, recorded, _ = await greet(port)
        writer.close()
    await find_no_head(recorded, "the head there does not know this node's MEGARL_LAUNCH_SECRET")


async def test_false_node_is_refused_and_named():
    async with listening_head(make_world(0)) as (rendezvous, port):
        reader, writer, _, challenge = await greet(port)
        node = make_world(1)
        keys = connection.derive_keys(replace(node, secret=OTHER_SECRET), NONCE, challenge.nonce)
        writer.write(MessageTags(keys.node).add(encode(make_hello(node))))
        assert await read_to_end(reader) == []
        await require_no_peer(rendezvous)
        writer.close()


async def test_node_that_does_not_trust_the_head_is_named():
    async with listening_head(make_world(0)) as (rendezvous, port):
        with expect_error(LaunchError, "node's MEGARL_LAUNCH_SECRET"):
            await search(make_world(1, secret=OTHER_SECRET, head_port=port))
        await require_no_peer(rendezvous)


async def test_recorded_messages_of_a_node_are_refused():
    node = make_world(1)
    async with listening_head(make_world(0)) as (rendezvous, port):
        # the node's side of a successful exchange
        _, writer, _, challenge = await greet(port)
        tags = MessageTags(connection.derive_keys(node, NONCE, challenge.nonce).node)
        hello = tags.add(encode(make_hello(node)))
        writer.write(hello)
        await rendezvous.wait_for_peers(HANG_SECONDS)
        writer.close()
    async with listening_head(make_world(0)) as (rendezvous, port):
        reader, writer, _, second = await greet(port)
        assert second != challenge
        writer.write(hello)
        assert await read_to_end(reader) == []
        await require_no_peer(rendezvous)
        writer.close()


async def test_answer_of_the_head_is_no_proof_of_a_node():
    """Sending back what the head has sent must not authenticate anybody."""
    async with listening_head(make_world(0)) as (rendezvous, port):
        node = make_world(1)
        # the proof as a tag, the challenge itself, and the head's nonce as the challenge of another connection
        first_reader, first, challenge_line, challenge = await greet(port)
        first.write(challenge.proof.encode() + b" " + encode(make_hello(node)))
        assert await read_to_end(first_reader) == []
        second_reader, second, *_ = await greet(port, nonce=challenge.nonce)
        second.write(challenge_line)
        assert await read_to_end(second_reader) == []
        await require_no_peer(rendezvous)
        for writer in (first, second):
            writer.close()


@pytest.mark.parametrize("early", [make_hello(make_world(1)), Joined()])
async def test_node_that_skips_the_challenge_is_refused(early):
    async with listening_head(make_world(0)) as (rendezvous, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encode(early))
        assert await read_to_end(reader) == []
        assert rendezvous.peers == []
        writer.close()


async def start_session(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, MessageTags]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    keys = await authenticate_head(reader, writer, make_world(1))
    return reader, writer, MessageTags(keys.node)


REFUSAL = Refused(reason="expected Hello, got Joined", same_job=False)


@pytest.mark.parametrize(
    ("first", "answers"),
    [(Joined(), [REFUSAL]), (replace(make_hello(make_world(1)), rank="1"), [])],  # type: ignore[arg-type]
    ids=["another message", "fields of other types"],
)
async def test_authenticated_node_needs_a_valid_hello(first, answers):
    async with listening_head(make_world(0)) as (rendezvous, port):
        reader, writer, tags = await start_session(port)
        writer.write(tags.add(encode(first)))
        assert [decode(line.partition(b" ")[2]) for line in await read_to_end(reader)] == answers
        assert rendezvous.peers == []
        writer.close()


@pytest.mark.parametrize("attack", ["repeated", "without a tag", "reordered", "changed"])
async def test_forged_message_in_a_session_ends_it(attack):
    async with listening_head(make_world(0)) as (rendezvous, port):
        _, writer, tags = await start_session(port)
        line = tags.add(encode(make_hello(make_world(1))))
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
        with expect_error(ConnectionLostError, "authentication", "message"):
            await peer.connection.receive()
        writer.close()


def test_token_of_ray_depends_on_secret_job_and_start():
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
