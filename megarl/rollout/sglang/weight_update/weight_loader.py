"""Loads weights into an SGLang model. SGLang calls `load` in every tensor-parallel rank of the engine.

    engine host                                      scheduler process of rank r
    command (plain data) --- SGLang's update call ---> load(model, [(command, placeholder)])
                                                       WRITERS[op]: check <-- vote --> the other ranks' checks
                                                                    write, if all ranks can
    reply file of rank r <---------------------------- READERS[op]: no vote

SGLang's own answer is not reliable: it is `Success` after a caught error, and an uncaught error kills the engine. So a
command names the file for the reply, and `load` never raises.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.errors import WeightSyncError
from megarl.reshard.transfer.bucket import identify_memory, open_bucket
from megarl.rollout.sglang.weight_update import finish_update, network_receive, shared_receive
from megarl.rollout.sglang.weight_update.commit_vote import CommitVote
from megarl.rollout.sglang.weight_update.expected_tensors import find_bucket_problems, read_expected_tensors
from megarl.rollout.sglang.weight_update.messages import WRITING, Command, Reply, checked_path, read_bucket, send_reply
from megarl.rollout.sglang.weight_update.repacking import find_repacked_modules

IMPORT_PATH = "megarl.rollout.sglang.weight_update.weight_loader.load"
"""Import path of `load`, for SGLang's options `custom_weight_loader` and `load_format`."""


def load(model: nn.Module, named_tensors: list[tuple[Command, Tensor]]) -> None:
    """Execute commands. This is SGLang's custom weight loader; the tensors are placeholders."""
    for command, _ in named_tensors:
        reply = Reply(_tp_rank())
        try:
            with torch.no_grad():
                _execute(model, command, reply)
        except WeightSyncError as e:
            reply.error = str(e)
        except Exception as e:  # noqa: BLE001 -- an uncaught error kills the engine and its host process
            reply.error = f"{type(e).__name__}: {e}"
        send_reply(reply, command)


def _execute(model: nn.Module, command: Command, reply: Reply) -> None:
    if command["op"] not in WRITING:
        READERS[command["op"]](model, command, reply)
        return
    vote = CommitVote(_tp_group(), checked_path(command["reply"], reply.rank))
    try:
        WRITERS[command["op"]](model, command, reply, vote)
    finally:
        if not vote.has_voted:
            vote.all_ready(ready=False)


def _write(model: Any, command: Command, reply: Reply, vote: CommitVote) -> None:
    bucket = read_bucket(command["bucket"])
    found = find_bucket_problems(
        bucket.slots, bucket.num_bytes, read_expected_tensors(command["model_path"]), command["dtype"]
    )
    _, size = identify_memory(bucket)
    if size < bucket.num_bytes:  # reading past the end of a mapping is a SIGBUS
        found.append(f"{bucket.path} needs {bucket.num_bytes} bytes, got {size}")
    if found:
        reply.error = "; ".join(found)
        return
    tensors = open_bucket(bucket)
    if not vote.all_ready(ready=True):
        return
    reply.wrote = True
    model.load_weights(list(tensors.items()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the sender reuses the bucket once it has the reply


def _report_repacking(model: nn.Module, _: Command, reply: Reply) -> None:
    reply.result = find_repacked_modules(model)


def _dump(model: nn.Module, command: Command, reply: Reply) -> None:
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters(remove_duplicate=False)}
    torch.save(parameters, Path(command["directory"]) / f"rank{reply.rank}.pt")
    buffers = {name: b.detach().cpu() for name, b in model.named_buffers(remove_duplicate=False)}
    torch.save(buffers, Path(command["directory"]) / f"rank{reply.rank}.buffers.pt")


WRITERS: dict[str, Callable[[nn.Module, Command, Reply, CommitVote], None]] = {
    "write": _write,
    "receive": network_receive.receive,
    "receive_boxes": shared_receive.receive_boxes,
    "finish": finish_update.finish,
}
"""Operations that write. Each checks first and writes only if all ranks are ready.

A rank that found no problem itself replies without an error, even if the vote fails.
"""

READERS: dict[str, Callable[[nn.Module, Command, Reply], None]] = {
    "prepare": network_receive.prepare,
    "connect": network_receive.connect,
    "prepare_boxes": shared_receive.prepare_boxes,
    "trace": finish_update.report_trace,
    "hash": finish_update.hash_boxes,
    "hash_parts": finish_update.hash_parts,
    "repacking": _report_repacking,
    "release": finish_update.release,
    "dump": _dump,
}
"""Operations that do not write weights."""


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _tp_group() -> dist.ProcessGroup | None:
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return None if group.world_size == 1 else group.cpu_group
