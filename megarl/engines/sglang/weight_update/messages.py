"""Commands of an engine's host to its TP ranks, and their replies, which are plain data in files of a private folder.

host                                          TP rank r of the node
share("spec", content) ---------------------> reads the path that its command names
                                              writes <prefix>.<r>.checked, then the reply <prefix>.<r>
states(5), take_replies(5) <----------------- prefix: reply_prefix(folder, 5)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.cluster.process.atomic_files import atomic_write
from megarl.model_files.json_object import JsonMapping
from megarl.reshard.transfer.bucket import Bucket, TensorSlot, WeightBucket

Command = Mapping[str, Any]
"""A command: `op`, the name of an operation of `weight_loader.py`, and its arguments.

    op               arguments
    write            `bucket`: fields of a `WeightBucket`, whose tensors are checked against model folder and dtype
    prepare          `offers`: by TP rank, fields of the `BoxOffer` of the trainer rank on its slot; or
                     `transfer_spec`: by TP rank, path of a pickled `TransferSpec`; `engine`: the engine's index in it
    connect          `transfer_group`: fields of a `TransferGroup`
    receive          `delta`: fields of a `DeltaUpdate`, or None; and for boxes of a trainer rank on the same slot
                     `abort_file`: ends the waits once it exists, by the reason that it contains; `seconds`: longest
                     wait for a round
    dump             `directory`, for rank<r>.pt (parameters) and rank<r>.buffers.pt
    trace, sum, repacking

`ControlCalls` adds `reply` (a path prefix; the rank is appended), and the engine's `model_path` and `dtype`.

Values are strings, numbers, lists and dicts only: SGLang unpickles nothing else.
"""


@dataclass
class Reply:
    """Reply of one TP rank to one command."""

    rank: int
    error: str | None = None
    """Why the rank could not execute the command; None: no error."""
    wrote: bool = False
    """The rank began to write parameters: after an error, it may hold a mixture of old and new weights."""
    result: Any = None
    """Result of the operation, as JSON data."""


def read_bucket(fields: JsonMapping) -> WeightBucket:
    """Decode the bucket of a `write` command."""
    slots = tuple(TensorSlot(**{**slot, "shape": tuple(slot["shape"])}) for slot in fields["slots"])
    return Bucket(fields["path"], fields["num_bytes"], slots)


def reply_path(prefix: str, rank: int) -> Path:
    """Return the path of a rank's reply to a command with `reply: prefix`."""
    return Path(f"{prefix}.{rank}")


def checked_path(prefix: str, rank: int) -> Path:
    """Return the path of the file that exists once a rank has checked a writing command and waits for the others."""
    return Path(f"{prefix}.{rank}.checked")


def send_reply(reply: Reply, command: Command) -> None:
    """Write the reply for the host atomically."""
    path = reply_path(command["reply"], reply.rank)
    # the host treats a missing reply as a failure
    with suppress(OSError), atomic_write(path, make_folder=False) as draft:
        draft.write_text(json.dumps(asdict(reply)))


def read_reply(path: Path) -> Reply | None:
    """Read the reply; None if the rank wrote none."""
    try:
        return Reply(**json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


ReplyState = Literal["missing", "checked", "replied"]
"""What a TP rank has done about a command. `checked`: it waits for the other ranks, to write if all of them can."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The folder of one node."""

    folder: str
    ranks: range
    """TP ranks of the node."""

    def share(self, name: str, content: bytes) -> str:
        """Write a file for the TP ranks; return its path."""
        path = Path(self.folder) / name
        path.write_bytes(content)
        return str(path)

    def remove(self, name: str) -> None:
        """Remove a shared file."""
        (Path(self.folder) / name).unlink(missing_ok=True)

    def states(self, number: int) -> list[ReplyState]:
        """Return the state of each of the node's ranks for command `number`."""
        prefix = reply_prefix(self.folder, number)
        return [
            "replied"
            if reply_path(prefix, rank).exists()
            else "checked"
            if checked_path(prefix, rank).exists()
            else "missing"
            for rank in self.ranks
        ]

    def take_replies(self, number: int) -> list[Reply | None]:
        """Return the replies of the node's ranks to command `number`, None for a missing one; removes the files."""
        prefix = reply_prefix(self.folder, number)
        replies = [read_reply(reply_path(prefix, rank)) for rank in self.ranks]
        for rank in self.ranks:
            reply_path(prefix, rank).unlink(missing_ok=True)
            checked_path(prefix, rank).unlink(missing_ok=True)
        return replies


def reply_prefix(folder: str, number: int) -> str:
    """Return the `reply` of command `number` for the ranks of the node that has the folder."""
    return str(Path(folder) / f"reply-{number}")


def find_unresponsive(states: Sequence[ReplyState]) -> list[int]:
    """Return the TP ranks that have not replied; if some of them wait for others, only those others.

    Args:
        states: by TP rank.
    """
    late = [rank for rank, state in enumerate(states) if state != "replied"]
    return [rank for rank in late if states[rank] == "missing"] or late
