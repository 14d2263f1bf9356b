"""Mutual authentication of two nodes by a secret that both know and that never crosses the network.

    worker node                                head node
      |------ Greeting: job, nonce --------------->|    nonce: a random number, used once
      |<----- Challenge: nonce, proof -------------|    proves that the head knows the secret
      |------ Hello, tagged ---------------------->|    proves that the node knows the secret
      |<----- further messages, tagged ----------->|

The proof and the keys of the tags are HMACs of both nonces and of the sender's role under the secret. A recorded
exchange is therefore of no use later, and neither side can be made to answer its own challenge. A tag also covers the
number of its message, so messages can be neither forged, nor repeated, nor reordered. Messages are not encrypted: none
contains a secret. The token of Ray is not sent either: each node derives it from the secret.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from dataclasses import dataclass

from megarl.launch.connection import ConnectionLostError, read_message
from megarl.launch.node_world import SECRET_VARIABLE, NodeWorld
from megarl.launch.protocol import Challenge, Greeting, Refused, encode


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
    if not hmac.compare_digest(answer.proof.encode(), _derive_proof(world, nonce, answer.nonce).encode()):
        raise UntrustedHeadError(f"the head there does not know this node's {SECRET_VARIABLE}")
    return _derive_keys(world, nonce, answer.nonce)


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
    writer.write(encode(Challenge(nonce=nonce, proof=_derive_proof(world, greeting.nonce, nonce))))
    return _derive_keys(world, greeting.nonce, nonce)


def _derive_proof(world: NodeWorld, node_nonce: str, head_nonce: str) -> str:
    return _derive(world, "proof of the head", node_nonce, head_nonce).hex()


def _derive_keys(world: NodeWorld, node_nonce: str, head_nonce: str) -> SessionKeys:
    return SessionKeys(
        head=_derive(world, "messages of the head", node_nonce, head_nonce),
        node=_derive(world, "messages of the node", node_nonce, head_nonce),
    )


def _derive(world: NodeWorld, purpose: str, *nonces: str) -> bytes:
    context = json.dumps(["megarl launch", purpose, world.job_id, *nonces])  # unambiguous: JSON quotes the strings
    return hmac.digest(world.secret.encode(), context.encode(), "sha256")
