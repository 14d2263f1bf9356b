"""Messages between the nodes of a launch: one JSON object per line.

    worker node                head node
      |------ Greeting --------->|
      |<----- Challenge ---------|    or Refused: the head of another job
      |------ Hello ------------>|    from here on with authentication tags, see `authentication`
      |<----- Accepted ----------|    or Refused: rank taken, or different package versions
      |<----- Welcome -----------|    after Hello from all nodes: the address of Ray
      |------ Joined ----------->|    its Ray node is started; otherwise Failed
      |<----- Heartbeat -------->|    all the time, in both directions
      |------ Stop ------------->|    this node got a termination signal
      |<----- End ---------------|    the command has ended, or a node was lost

The worker node closes the connection, after its Ray processes have ended.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import get_args

from pydantic import TypeAdapter


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
