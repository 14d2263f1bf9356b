"""Writes new weights into an SGLang model. SGLang calls `load` in every tensor-parallel rank of the engine.

engine host                                  scheduler process of rank r
order (plain data) --- SGLang's update call ---> load(model, [(order, placeholder)])
                                                 WRITERS[op]: check <-- vote --> the other ranks' checks
                                                              write, if all ranks can
reply file of rank r <-------------------------- READERS[op]: no vote

SGLang's own answer says nothing: it is `Success` after a caught error, and an uncaught one kills the engine. So an
order names the file that the reply goes to, and `load` never raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.reshard.transfer.bucket import open_bucket
from megarl.rollout.sglang.weight_update import box_writer, network_receive
from megarl.rollout.sglang.weight_update.commit_vote import Ballot
from megarl.rollout.sglang.weight_update.expected_tensors import problems, read_manifest
from megarl.rollout.sglang.weight_update.messages import WRITING, Order, Reply, mark_path, read_bucket, send_reply

IMPORT_PATH = "megarl.rollout.sglang.weight_update.weight_loader.load"
"""As SGLang's `custom_weight_loader` and `load_format` name it."""


def load(model: nn.Module, named_tensors: list[tuple[Order, Tensor]]) -> None:
    """SGLang's custom weight loader: executes orders; the tensors are placeholders."""
    for order, _ in named_tensors:
        reply = Reply(_tp_rank())
        try:
            with torch.no_grad():
                _execute(model, order, reply)
        except Exception as e:  # noqa: BLE001 -- one that gets out kills the engine and its host process
            reply.error = f"{type(e).__name__}: {e}"
        send_reply(reply, order)


def _execute(model: nn.Module, order: Order, reply: Reply) -> None:
    if order["op"] not in WRITING:
        READERS[order["op"]](model, order, reply)
        return
    ballot = Ballot(_tp_group(), mark_path(order["reply"], reply.rank))
    try:
        WRITERS[order["op"]](model, order, reply, ballot)
    finally:
        if not ballot.cast:
            ballot.agree(ready=False)


def _write(model: Any, order: Order, reply: Reply, ballot: Ballot) -> None:
    bucket = read_bucket(order["bucket"])
    found = problems(bucket.slots, bucket.num_bytes, read_manifest(order["model_path"]), order["dtype"])
    size = os.path.getsize(bucket.path)
    if size < bucket.num_bytes:  # reading past the end of a mapping is a SIGBUS
        found.append(f"{bucket.path} needs {bucket.num_bytes} bytes, got {size}")
    if found:
        reply.error = "; ".join(found)
        return
    tensors = open_bucket(bucket)
    if not ballot.agree(ready=True):
        return
    reply.wrote = True
    model.load_weights(list(tensors.items()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the sender reuses the bucket once it has the reply


def _dump(model: nn.Module, order: Order, reply: Reply) -> None:
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters(remove_duplicate=False)}
    torch.save(parameters, Path(order["directory"]) / f"rank{reply.rank}.pt")
    buffers = {name: b.detach().cpu() for name, b in model.named_buffers(remove_duplicate=False)}
    torch.save(buffers, Path(order["directory"]) / f"rank{reply.rank}.buffers.pt")


WRITERS: dict[str, Callable[[Any, Order, Reply, Ballot], None]] = {
    "write": _write,
    "write_boxes": box_writer.write_boxes,
    "receive": network_receive.receive,
    "finish": box_writer.finish,
}
"""Each checks first, and writes only if the ballot agrees; the reply of a rank that found nothing wrong is no error."""

READERS: dict[str, Callable[[Any, Order, Reply], None]] = {
    "prepare": network_receive.prepare,
    "join": network_receive.join,
    "trace": box_writer.tell_trace,
    "hash": box_writer.hash_boxes,
    "dump": _dump,
}


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _tp_group() -> dist.ProcessGroup | None:
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return None if group.world_size == 1 else group.cpu_group
