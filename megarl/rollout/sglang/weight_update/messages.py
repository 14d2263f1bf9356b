"""What an engine's host asks of its TP ranks, and what they answer: plain data both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.reshard.transfer.bucket import BoxBucket, TensorSlot, WeightBucket
from megarl.reshard.transfer.process_groups import Meeting
from megarl.rollout.sglang.weight_update.message_encoding import encode_boxes

Order = Mapping[str, Any]
"""`op` and `reply` (a path; the rank is appended), and what the operation needs. Strings, numbers, lists and dicts
only: SGLang unpickles nothing else."""

WRITING = frozenset({"write", "write_boxes", "receive", "finish"})
"""Operations that may touch parameters: if one rank cannot execute its order, no rank does."""


@dataclass
class Reply:
    """What one rank says about one order."""

    rank: int
    error: str | None = None
    wrote: bool = False
    """Parameters were touched: with an error, the rank may hold a mixture of weights."""
    result: Any = None
    """JSON data."""


def write_order(bucket: WeightBucket, model_path: str, dtype: str) -> dict[str, Any]:
    """The order to write a bucket's tensors, checked against the model folder and the engine's dtype."""
    return {"op": "write", "bucket": asdict(bucket), "model_path": model_path, "dtype": dtype}


def write_boxes_order(bucket: BoxBucket | None, session: int) -> dict[str, Any]:
    """The order to write one rank's boxes; within a session none may meet another."""
    return {"op": "write_boxes", "bucket": None if bucket is None else encode_boxes(bucket), "session": session}


def prepare_order(handover: Path, engine: int) -> dict[str, Any]:
    """The order to plan what the rank receives from now on.

    Args:
        handover: file of a pickled `Handover`, written by the engine's host.
        engine: the engine's number in it.
    """
    return {"op": "prepare", "handover": str(handover), "engine": engine}


def join_order(meeting: Meeting) -> dict[str, Any]:
    """The order to connect with the trainer's ranks and other engines'."""
    return {"op": "join", "meeting": asdict(meeting)}


def receive_order(session: int) -> dict[str, Any]:
    """The order to receive the boxes of the whole model, as it was prepared."""
    return {"op": "receive", "session": session}


def finish_order(session: int, arrived: Iterable[str], model_path: str, dtype: str) -> dict[str, Any]:
    """The order to check that boxes and `arrived` (what came under Hugging Face names) make a whole model."""
    return {"op": "finish", "session": session, "arrived": list(arrived), "model_path": model_path, "dtype": dtype}


def trace_order(model_path: str, dtype: str) -> dict[str, Any]:
    """The order to tell the rank's trace, as `encode_traces` gives it."""
    return {"op": "trace", "model_path": model_path, "dtype": dtype}


def hash_order(model_path: str, dtype: str) -> dict[str, Any]:
    """The order to tell the digest of each of the layout's pieces, in hexadecimal, in their order."""
    return {"op": "hash", "model_path": model_path, "dtype": dtype}


def dump_order(directory: str) -> dict[str, Any]:
    """The order to save the rank's parameters and buffers below `directory`: rank<r>.pt, rank<r>.buffers.pt."""
    return {"op": "dump", "directory": directory}


def read_bucket(fields: Mapping[str, Any]) -> WeightBucket:
    """The bucket of a `write` order."""
    slots = tuple(TensorSlot(**{**slot, "shape": tuple(slot["shape"])}) for slot in fields["slots"])
    return WeightBucket(fields["path"], fields["num_bytes"], slots)


def reply_path(prefix: str, rank: int) -> Path:
    """Where a rank's reply to an order with `reply: prefix` lies."""
    return Path(f"{prefix}.{rank}")


def mark_path(prefix: str, rank: int) -> Path:
    """The file that says that a rank has checked its part of a writing order, and waits for the others."""
    return Path(f"{prefix}.{rank}.checked")


def send_reply(reply: Reply, order: Order) -> None:
    """Leave the reply for the host, all of it or nothing."""
    path = reply_path(order["reply"], reply.rank)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(asdict(reply)))
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)  # the host takes a missing reply for a failure


def read_reply(path: Path) -> Reply | None:
    """The reply, or None where the rank left none."""
    try:
        return Reply(**json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
