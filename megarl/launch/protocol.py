"""Messages between the nodes of a launch: one JSON object per line.

    worker node                head node
      |------ Hello ------------>|
      |<----- Accepted ----------|    or Refused: wrong job, rank taken, or different package versions
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a node: describes the node."""

    token: str
    """Token of the job, `NodeWorld.token`."""
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


Message = Hello | Accepted | Refused | Welcome | Joined | Failed | Heartbeat | Stop | End

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, Accepted, Refused, Welcome, Joined, Failed, Heartbeat, Stop, End)
}


def encode(message: Message) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode the message of one line.

    Raises:
        ValueError: the line is not a message; its sender is not a megarl node.
    """
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"not a message of megarl launch: {line[:80]!r}") from e
