"""Authenticated connection between two nodes: its messages, and heartbeats that detect the loss of the other end.

Both nodes prove that they know a secret, which never crosses the network:

    worker node                                head node
      |------ Greeting: job, nonce --------------->|    nonce: a random number, used once
      |<----- Challenge: nonce, proof -------------|    proves that the head knows the secret
      |------ Hello, tagged ---------------------->|    proves that the node knows the secret
      |<----- further messages, tagged ----------->|

The proof and the keys of the tags are HMACs of both nonces and of the sender's role under the secret. A recorded
exchange is therefore of no use later, and neither side can be made to answer its own challenge. A tag also covers the
number of its message, so messages can be neither forged, nor repeated, nor reordered. Messages are not encrypted: none
contains a secret. The token of Ray is not sent either: each node derives it from the secret.

Messages are JSON objects, one per line:

    worker node                head node
      |------ Greeting --------->|
      |<----- Challenge ---------|    or Refused: the head of another job
      |------ Hello ------------>|    from here on with authentication tags
      |<----- Accepted ----------|    or Refused: rank taken, or different package versions
      |<----- Welcome -----------|    after Hello from all nodes: the address of Ray
      |------ Joined ----------->|    its Ray node is started; otherwise Failed
      |<----- Heartbeat -------->|    all the time, in both directions
      |------ Stop ------------->|    this node got a termination signal
      |<----- End ---------------|    the command has ended, or a node was lost

The worker node closes the connection, after its Ray processes have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass
from typing import get_args

from pydantic import TypeAdapter

from megarl.cluster.launch.node_world import SECRET_VARIABLE, NodeWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """First message of a node: challenges the head to prove that it knows the secret."""

    job: str
    """The job of the node, `NodeWorld.job_id`."""
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """Answer of the head to `Greeting`: its proof, and its own challenge."""

    nonce: str
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First authenticated message of a node: describes the node."""

    rank: int
    size: int
    """Number of nodes of the launch, as configured on this node."""
    host: str
    address: str | None
    """Address of this node given by the user; None: not given."""
    versions: dict[str, str]
    """Versions of the packages that must agree on all nodes."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The head has accepted the node, which now waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The head has not accepted the node."""

    reason: str
    same_job: bool
    """Whether the node belongs to the head's job; then it need not try other ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All nodes have connected; the node may join Ray."""

    ray_address: str
    node_address: str
    """Address at which the other nodes reach the receiver."""
    ray_nonce: str
    """Number from which each node derives the token of Ray, see `authentication.derive_ray_token`."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The sender has joined the Ray cluster."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The sender has failed and cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is alive."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The sender got a termination signal, so the run must end."""

    signal: int


@dataclass(frozen=True, slots=True)
class End:
    """The run is over; the receiver must stop."""

    exit_code: int
    reason: str | None
    """What aborted the run; None if the command ended by itself."""


Message = Greeting | Challenge | Hello | Accepted | Refused | Welcome | Joined | Failed | Heartbeat | Stop | End

_ADAPTERS: dict[str, TypeAdapter[Message]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode the message of one line, and check the types of its fields.

    Raises:
        ValueError: the line is not a message; its sender is not a megarl node.
    """
    try:
        return _ADAPTERS[json.loads(line)["kind"]].validate_json(line, strict=True)
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f"not a message of megarl launch: {line[:80]!r}") from e


HEARTBEATS_PER_TIMEOUT = 6
MAX_HEARTBEAT_INTERVAL_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS = 2.0
"""Time limit for closing a connection whose other end may be lost."""


class ConnectionLostError(Exception):
    """The connection to the other node is lost; the message states how this was detected."""


class MessageTags:
    """Authentication tags of the messages that travel in one direction of a connection.

    A line is `TAG MESSAGE`, where the tag is an HMAC-SHA256 of the message and of its number.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._num_messages = 0

    def add(self, message: bytes) -> bytes:
        """Return the line of the next message to send."""
        return self._next_tag(message) + b" " + message

    def check(self, line: bytes) -> bytes:
        """Return the message in the next line received.

        Raises:
            ConnectionLostError: the tag is wrong.
        """
        tag, _, message = line.partition(b" ")
        if not hmac.compare_digest(tag, self._next_tag(message)):
            raise ConnectionLostError("a message has a wrong authentication tag")
        return message

    def _next_tag(self, message: bytes) -> bytes:
        number = self._num_messages.to_bytes(8, "big")
        self._num_messages += 1
        return hmac.digest(self._key, number + message, "sha256").hex().encode()


async def read_message(reader: asyncio.StreamReader, tags: MessageTags | None = None) -> Message:
    """Return the next message; `tags` check its authentication tag, None reads a message without a tag.

    Raises:
        ConnectionLostError: the connection is closed or broken, or the line is not a message with the right tag.
    """
    try:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionLostError("the connection was closed unexpectedly")
        return decode(line if tags is None else tags.check(line))
    except ConnectionResetError:  # the peer closed its socket while data was under way
        raise ConnectionLostError("the connection was closed unexpectedly") from None
    except OSError as e:
        raise ConnectionLostError(f"the connection failed: {e}") from e
    except ValueError as e:  # not a message, or a line that exceeds the limit of the reader
        raise ConnectionLostError(str(e)) from e


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Flush pending data for at most `CLOSE_TIMEOUT_SECONDS`, then close the connection."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), CLOSE_TIMEOUT_SECONDS)
    writer.transport.abort()


class Connection:
    """Message stream to and from another node; sends heartbeats in the background.

    Args:
        timeout_seconds: silence of the other end after which the connection counts as lost.
        send_key: key of the tags of outgoing messages.
        receive_key: key of the tags of incoming messages.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_seconds: float,
        *,
        send_key: bytes,
        receive_key: bytes,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout_seconds
        self._outgoing = MessageTags(send_key)
        self._incoming = MessageTags(receive_key)
        self.local_address: str = writer.get_extra_info("sockname")[0]
        self.remote_address: str = writer.get_extra_info("peername")[0]
        self._heartbeat_task = asyncio.get_running_loop().create_task(self._send_heartbeats())

    def send(self, message: Message) -> None:
        """Queue a message for sending; a lost connection is reported by `receive`, not here."""
        if not self._writer.is_closing():
            self._writer.write(self._outgoing.add(encode(message)))

    async def receive(self) -> Message:
        """Return the next message that is not a heartbeat.

        Raises:
            ConnectionLostError: the connection is closed, broken or silent, or a line is not a message with its tag.
        """
        while True:
            try:
                message = await asyncio.wait_for(read_message(self._reader, self._incoming), self._timeout)
            except TimeoutError:
                raise ConnectionLostError(f"no message for {self._timeout:g} s") from None
            if not isinstance(message, Heartbeat):
                return message

    async def close(self) -> None:
        """Flush pending messages for at most `CLOSE_TIMEOUT_SECONDS`, then close the connection."""
        self._heartbeat_task.cancel()
        await close_writer(self._writer)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(MAX_HEARTBEAT_INTERVAL_SECONDS, self._timeout / HEARTBEATS_PER_TIMEOUT))
            self.send(Heartbeat())


class UntrustedHeadError(ConnectionLostError):
    """What listens at the head's address did not prove that it knows the secret of this run."""


class OtherJobError(ConnectionLostError):
    """The two ends of the connection belong to different jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """Keys of one connection, for the tags of its messages."""

    head: bytes
    """Key of the messages that the head sends."""
    node: bytes
    """Key of the messages that the worker node sends."""


def make_nonce() -> str:
    """Return 32 random bytes as hexadecimal digits."""
    return secrets.token_hex(32)


def derive_ray_token(world: NodeWorld, nonce: str) -> str:
    """Return the authentication token of Ray: the same on all nodes that know the secret and the head's `nonce`."""
    return _derive(world, "token of Ray", nonce).hex()


async def authenticate_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, world: NodeWorld
) -> SessionKeys:
    """Challenge the head on a new connection and return the session's keys; called by a worker node.

    Raises:
        OtherJobError: the head of another job listens there.
        UntrustedHeadError: the other end does not know the secret.
        ConnectionLostError: the connection broke, or the answer is not part of this protocol.
    """
    nonce = make_nonce()
    writer.write(encode(Greeting(job=world.job_id, nonce=nonce)))
    answer = await read_message(reader)
    if isinstance(answer, Refused):
        raise OtherJobError("this is the head of another job")
    if not isinstance(answer, Challenge):
        raise ConnectionLostError(f"expected Challenge, got {type(answer).__name__}")
    if not hmac.compare_digest(answer.proof.encode(), derive_proof(world, nonce, answer.nonce).encode()):
        raise UntrustedHeadError(f"the head there does not know this node's {SECRET_VARIABLE}")
    return derive_keys(world, nonce, answer.nonce)


async def answer_node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, world: NodeWorld) -> SessionKeys:
    """Answer and challenge a node on a new connection and return the session's keys; called by the head.

    The node is authenticated once its first tagged message has arrived.

    Raises:
        OtherJobError: the node belongs to another job.
        ConnectionLostError: the connection broke, or the first message is not part of this protocol.
    """
    greeting = await read_message(reader)
    if not isinstance(greeting, Greeting):
        raise ConnectionLostError(f"expected Greeting, got {type(greeting).__name__}")
    if greeting.job != world.job_id:
        writer.write(encode(Refused(reason="this is the head of another job", same_job=False)))
        raise OtherJobError("the node belongs to another job")
    nonce = make_nonce()
    writer.write(encode(Challenge(nonce=nonce, proof=derive_proof(world, greeting.nonce, nonce))))
    return derive_keys(world, greeting.nonce, nonce)


def derive_proof(world: NodeWorld, node_nonce: str, head_nonce: str) -> str:
    """Return the digest by which the head proves that it knows the secret, as hexadecimal text."""
    return _derive(world, "proof of the head", node_nonce, head_nonce).hex()


def derive_keys(world: NodeWorld, node_nonce: str, head_nonce: str) -> SessionKeys:
    """Return the keys of the message tags of one connection, which depend on the secret and both nonces."""
    return SessionKeys(
        head=_derive(world, "messages of the head", node_nonce, head_nonce),
        node=_derive(world, "messages of the node", node_nonce, head_nonce),
    )


def _derive(world: NodeWorld, purpose: str, *nonces: str) -> bytes:
    context = json.dumps(["megarl launch", purpose, world.job_id, *nonces])  # unambiguous: JSON quotes the strings
    return hmac.digest(world.secret.encode(), context.encode(), "sha256")
