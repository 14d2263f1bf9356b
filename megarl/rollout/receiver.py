"""Writes new weights into an SGLang model. SGLang calls `load` in every tensor-parallel rank of the engine.

engine host                                  scheduler process of rank r
order (plain data) --- SGLang's update call ---> load(model, [(order, placeholder)])
reply file of rank r <---------------------------- OPERATIONS[order["op"]]

SGLang's own answer says nothing: it is `Success` after a caught error, and an uncaught one kills the engine. So an
order names the file that the reply goes to, and `load` never raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megarl.reshard.bucket import open_bucket
from megarl.rollout import boxes
from megarl.rollout.manifest import problems, read_manifest
from megarl.rollout.orders import Order, Reply, read_bucket, send_reply

IMPORT_PATH = "megarl.rollout.receiver.load"
"""As SGLang's `custom_weight_loader` and `load_format` name it."""


def load(model: nn.Module, named_tensors: list[tuple[Order, Tensor]]) -> None:
    """SGLang's custom weight loader: executes orders; the tensors are placeholders."""
    for order, _ in named_tensors:
        reply = Reply(_tp_rank())
        try:
            with torch.no_grad():
                OPERATIONS[order["op"]](model, order, reply)
        except Exception as e:  # noqa: BLE001 -- one that gets out kills the engine and its host process
            reply.error = f"{type(e).__name__}: {e}"
        send_reply(reply, order)


def _write(model: Any, order: Order, reply: Reply) -> None:
    bucket = read_bucket(order["bucket"])
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


OPERATIONS: dict[str, Callable[[Any, Order, Reply], None]] = {
    "write": _write,
    "write_boxes": boxes.write_boxes,
    "finish": boxes.finish,
    "trace": boxes.tell_trace,
    "hash": boxes.hash_boxes,
    "dump": _dump,
}


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)
