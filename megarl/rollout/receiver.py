"""Writes new weights into an SGLang model. SGLang calls `load` in every tensor-parallel rank of the engine.

engine host                                  scheduler process of rank r
order (plain data) --- SGLang's update call ---> load(model, [(order, placeholder)])
reply file of rank r <---------------------------- OPERATIONS[order["op"]]

SGLang's own answer says nothing: it is `Success` after a caught error, and an uncaught one kills the engine. So an
order names the file that the reply goes to, and `load` never raises.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megarl.reshard.bucket import TensorSlot, WeightBucket, open_bucket
from megarl.rollout.manifest import problems, read_manifest

IMPORT_PATH = "megarl.rollout.receiver.load"
"""As SGLang's `custom_weight_loader` and `load_format` name it."""

Order = Mapping[str, Any]
"""`op` and `reply` (a path; the rank is appended), and what the operation needs. Strings, numbers, lists and dicts
only: SGLang unpickles nothing else."""


@dataclass
class Reply:
    """What one rank says about one order."""

    rank: int
    error: str | None = None
    wrote: bool = False
    """Parameters were touched: with an error, the rank may hold a mixture of weights."""


def write_order(bucket: WeightBucket, model_path: str, dtype: str) -> dict[str, Any]:
    """The order to write a bucket's tensors, checked against the model folder and the engine's dtype."""
    return {"op": "write", "bucket": asdict(bucket), "model_path": model_path, "dtype": dtype}


def dump_order(directory: str) -> dict[str, Any]:
    """The order to save the rank's parameters to `<directory>/rank<r>.pt`, name -> tensor."""
    return {"op": "dump", "directory": directory}


def reply_path(prefix: str, rank: int) -> Path:
    """Where a rank's reply to an order with `reply: prefix` lies."""
    return Path(f"{prefix}.{rank}")


def read_reply(path: Path) -> Reply | None:
    """The reply, or None where the rank left none."""
    try:
        return Reply(**json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def load(model: nn.Module, named_tensors: list[tuple[Order, Tensor]]) -> None:
    """SGLang's custom weight loader: executes orders; the tensors are placeholders."""
    for order, _ in named_tensors:
        reply = Reply(_tp_rank())
        try:
            with torch.no_grad():
                OPERATIONS[order["op"]](model, order, reply)
        except Exception as e:  # noqa: BLE001 -- one that gets out kills the engine and its host process
            reply.error = f"{type(e).__name__}: {e}"
        _send(reply, order)


def _write(model: Any, order: Order, reply: Reply) -> None:
    bucket = _bucket(order["bucket"])
    found = problems(bucket.slots, bucket.num_bytes, read_manifest(order["model_path"]), order["dtype"])
    size = os.path.getsize(bucket.path)
    if size < bucket.num_bytes:  # reading past the end of a mapping is a SIGBUS
        found.append(f"{bucket.path} needs {bucket.num_bytes} bytes, got {size}")
    if found:
        reply.error = "; ".join(found)
        return
    tensors = open_bucket(bucket)
    reply.wrote = True
    model.load_weights(list(tensors.items()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the sender reuses the bucket once it has the reply


def _dump(model: nn.Module, order: Order, reply: Reply) -> None:
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters(remove_duplicate=False)}
    torch.save(parameters, Path(order["directory"]) / f"rank{reply.rank}.pt")


OPERATIONS: dict[str, Callable[[Any, Order, Reply], None]] = {"write": _write, "dump": _dump}


def _bucket(fields: Mapping[str, Any]) -> WeightBucket:
    slots = tuple(TensorSlot(**{**slot, "shape": tuple(slot["shape"])}) for slot in fields["slots"])
    return WeightBucket(fields["path"], fields["num_bytes"], slots)


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _send(reply: Reply, order: Order) -> None:
    path = reply_path(order["reply"], reply.rank)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(asdict(reply)))
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)  # the host takes a missing reply for a failure
