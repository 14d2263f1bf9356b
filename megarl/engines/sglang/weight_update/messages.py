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
from megarl.engines.sglang.weight_layout.engine_trace import EngineTrace, Padding
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.box_channel import BoxOffer
from megarl.reshard.transfer.bucket import TensorSlot, WeightBucket
from megarl.reshard.transfer.process_groups import TransferGroup


def encode_traces(traces: Sequence[EngineTrace]) -> JsonObject:
    """Encode an engine's traces, which share names and tensors, as JSON data."""
    tensors: dict[str, TensorSpec] = {}
    for trace in traces:
        tensors |= trace.layout.tensors
    names = {name: i for i, name in enumerate(tensors)}
    locals_: dict[str, int] = {}

    def local_index(local: str) -> int:
        return locals_.setdefault(local, len(locals_))

    ranks = [
        {
            "pieces": [
                [names[p.tensor], encode_box(p.box), local_index(p.local), encode_box(p.local_box)]
                for p in trace.layout.pieces
            ],
            "padding": [[local_index(p.local), encode_box(p.local_box), p.value] for p in trace.padding],
            "derived": [names[name] for name in trace.derived],
        }
        for trace in traces
    ]
    specs = [[name, list(spec.shape), spec.dtype] for name, spec in tensors.items()]
    return {"tensors": specs, "locals": list(locals_), "ranks": ranks}


def decode_traces(data: JsonMapping) -> list[EngineTrace]:
    """Decode the data of `encode_traces`."""
    tensors = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in data["tensors"]}
    names, locals_ = list(tensors), data["locals"]
    return [
        EngineTrace(
            WeightLayout(
                tensors,
                tuple(
                    ShardPiece(names[t], decode_box(box), locals_[n], decode_box(there))
                    for t, box, n, there in rank["pieces"]
                ),
            ),
            tuple(Padding(locals_[n], decode_box(box), value) for n, box, value in rank["padding"]),
            tuple(names[t] for t in rank["derived"]),
        )
        for rank in data["ranks"]
    ]


def encode_box(box: Box) -> list[int]:
    """Encode a box as a flat list of its edges."""
    return [edge for side in box for edge in side]


def decode_box(flat: list[int]) -> Box:
    """Decode the list of `encode_box`."""
    return tuple(zip(flat[::2], flat[1::2], strict=True))


Command = Mapping[str, Any]
"""A command: `op` and the arguments of the operation.

`RankCommands` adds `reply` (a path prefix; the rank is appended), and the engine's `model_path` and `dtype`.

Values are strings, numbers, lists and dicts only: SGLang unpickles nothing else.
"""

WRITING = frozenset({"write", "receive", "receive_boxes", "finish"})
"""Operations that may write parameters: if one rank cannot execute its command, no rank does."""


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


def write_command(bucket: WeightBucket) -> Command:
    """Make the command to write a bucket's tensors after checking them against the model folder and engine dtype."""
    return {"op": "write", "bucket": asdict(bucket)}


def prepare_command(transfer_spec: Sequence[str], engine: int) -> Command:
    """Make the command to plan what the rank receives in later syncs.

    Args:
        transfer_spec: for each TP rank the path of a pickled `TransferSpec`, written by the host of its node.
        engine: index of the engine in it.
    """
    return {"op": "prepare", "transfer_spec": list(transfer_spec), "engine": engine}


def connect_command(transfer_group: TransferGroup) -> Command:
    """Make the command to connect with the trainer's ranks and the other engines' ranks."""
    return {"op": "connect", "transfer_group": asdict(transfer_group)}


def receive_command(session: int, delta: DeltaUpdate | None) -> Command:
    """Make the command to receive the model as planned with `prepare`, or what `delta` does not leave out of it."""
    return {"op": "receive", "session": session, "delta": None if delta is None else asdict(delta)}


def prepare_boxes_command(offer: BoxOffer) -> Command:
    """Make the command to connect with the trainer rank on the same slot, which offers boxes."""
    return {"op": "prepare_boxes", "offer": asdict(offer)}


def receive_boxes_command(session: int, abort_file: Path, seconds: float, *, coded: bool) -> Command:
    """Make the command to copy the boxes of all rounds, as planned with `prepare_boxes`.

    Args:
        abort_file: the rank stops waiting once the host has created it; it contains the reason.
        seconds: longest wait for a round.
        coded: codes of changed elements come, which the trainer rank lists; False: all boxes come.
    """
    command = {"op": "receive_boxes", "session": session, "abort_file": str(abort_file), "seconds": seconds}
    return command | {"coded": coded}


def finish_command(session: int) -> Command:
    """Make the command to check that the boxes cover the model, and to finish it."""
    return {"op": "finish", "session": session}


def dump_command(directory: str) -> Command:
    """Make the command to save the rank's parameters and buffers in `directory`: rank<r>.pt, rank<r>.buffers.pt."""
    return {"op": "dump", "directory": directory}


def read_bucket(fields: JsonMapping) -> WeightBucket:
    """Decode the bucket of a `write` command."""
    slots = tuple(TensorSlot(**{**slot, "shape": tuple(slot["shape"])}) for slot in fields["slots"])
    return WeightBucket(fields["path"], fields["num_bytes"], slots)


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
