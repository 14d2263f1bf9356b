"""What the nodes of a run say to each other: one JSON object a line.

    a node                     the head
      |------ Hello ------------>|
      |<----- Noted -------------|    or Refused: another job's, a rank that is taken, other packages
      |<----- Welcome -----------|    once all nodes have said Hello: where Ray is
      |------ Joined ----------->|    its Ray node is up, or Failed
      |<----- Beat ------------->|    all the while, both ways
      |------ Stop ------------->|    this node was told to end
      |<----- End ---------------|    the command has ended, or a node was lost

The connection is closed by the node, after its part of Ray has ended.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MAX_BYTES = 2**16
"""Of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A node presents itself."""

    token: str
    rank: int
    size: int
    """Nodes of the run, as this node was told."""
    host: str
    address: str | None
    """Where the user wants this node to be reached."""
    versions: dict[str, str]
    """Of the packages that have to agree."""


@dataclass(frozen=True, slots=True)
class Noted:
    """The node is taken in, and waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The node is not taken in."""

    reason: str
    ours: bool
    """The node belongs to the head's job, and will not be taken in elsewhere either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All nodes are there."""

    ray_address: str
    node_address: str
    """Where the other nodes reach this one."""


@dataclass(frozen=True, slots=True)
class Joined:
    """This node is a node of Ray."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This node cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    """This node is alive."""


@dataclass(frozen=True, slots=True)
class Stop:
    """This node was told to end: the run is over."""

    signal: int


@dataclass(frozen=True, slots=True)
class End:
    """The run is over."""

    exit_code: int
    reason: str | None
    """What ended it, where that was not the command."""


Message = Hello | Noted | Refused | Welcome | Joined | Failed | Beat | Stop | End

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, Noted, Refused, Welcome, Joined, Failed, Beat, Stop, End)
}


def encode(message: Message) -> bytes:
    """The message as a line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line.

    Raises:
        ValueError: the line holds none; who sent it does not speak for megarl.
    """
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"not a message of megarl launch: {line[:80]!r}") from e
