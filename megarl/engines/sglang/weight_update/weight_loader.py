"""Loads weights into an SGLang model. SGLang calls `load` in every tensor-parallel rank of the engine.

    engine host                                      scheduler process of rank r
    command (plain data) --- SGLang's update call ---> load(model, [(command, placeholder)])
                                                       WRITERS[op]: check <-- vote --> the other ranks' checks
                                                                    write, if all ranks can
    reply file of rank r <---------------------------- READERS[op]: no vote

SGLang's own answer is not reliable: it is `Success` after a caught error, and an uncaught error kills the engine. So a
command names the file for the reply, and `load` never raises.

Boxes of weights are received from the trainer in two ways.

    over the network, from the trainer's ranks
    prepare         plan what this rank receives, and check that it fits the model                once
    connect         connect with the trainer's ranks and the other engines                        after failures too
    receive         if every rank of the engine is ready, receive the boxes                       every update

    through shared memory, from the trainer rank on the same slot
    prepare_boxes   read which boxes come in which round, check them against the model, connect   once
    receive_boxes   if every rank of the engine is ready, copy the boxes of all rounds, or        every update
                    decode the changed elements that the trainer rank lists

Modules whose weights SGLang changes after it has loaded them are refused: SGLang calls `process_weights_after_loading`
of every module's `quant_method` at the end of a load and of each weight update. For plain weights it does nothing. Some
kernels need another layout, and the call then packs, permutes or quantizes the parameters: boxes of the model's layout
do not fit any more, and if an update is aborted, packing again what was never unpacked gives other weights.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.engines.sglang.weight_update import finish_update
from megarl.engines.sglang.weight_update.finish_update import CommitVote, get_session, make_planned_boxes, reset_session
from megarl.engines.sglang.weight_update.messages import Command, Reply, checked_path, read_bucket, send_reply
from megarl.engines.sglang.weight_update.planned_boxes import PlannedBoxes, find_bucket_problems, read_expected_tensors
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Ints
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.box_channel import BoxOffer, BoxReceiver
from megarl.reshard.transfer.bucket import MappedBuckets, Parameters, open_bucket
from megarl.reshard.transfer.process_groups import TransferGroup

PLAIN_EXPERT_RUNNERS = frozenset({"triton", "deep_gemm", "cutlass"})
"""SGLang's backends for experts in FP8 that read the weights as they are loaded, unless DeepGEMM changes the scales."""


def find_repacked_modules(model: nn.Module) -> list[str]:
    """Return `name (class of its quant_method)` for each module whose weights are not kept as they are loaded."""
    return [
        f"{name} ({type(method).__name__})"
        for name, module in model.named_modules()
        if (method := getattr(module, "quant_method", None)) is not None and not _keeps_layout(module, method)
    ]


def _keeps_layout(module: nn.Module, method: Any) -> bool:
    """Return whether `process_weights_after_loading` leaves the weights of this module as they are."""
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.layers.quantization.fp8 import Fp8KVCacheMethod, Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

    process = getattr(type(method), "process_weights_after_loading", None)
    if process is None or process is QuantizeMethodBase.process_weights_after_loading:
        return True
    if getattr(module, "use_intel_amx_backend", False):  # packed for AMX
        return False
    if type(method) in (UnquantizedLinearMethod, Fp8KVCacheMethod):
        return True
    if type(method) in (Fp8LinearMethod, Fp8MoEMethod):
        return keeps_fp8_blocks(module, method)
    if type(method) is not UnquantizedFusedMoEMethod:
        return False
    is_interleaved = getattr(module, "w13_swiglu_interleaved", False)
    return not method.use_flashinfer_trtllm_moe and not is_interleaved and torch.version.hip is None


def keeps_fp8_blocks(module: nn.Module, method: Any) -> bool:
    """Return whether a module in FP8 keeps values, and float32 scales of blocks of 128 x 128, as they are loaded.

    It does not where DeepGEMM needs scales that are powers of two, as on Blackwell GPUs, where Marlin or FlashInfer
    kernels need another order, with another block size, and on AMD GPUs.
    """
    if not method.block_quant or method.weight_block_size != [128, 128] or torch.version.hip is not None:
        return False
    if method.use_mxfp8 or getattr(method, "use_marlin", False) or getattr(method, "block_fp8_as_mxfp8", False):
        return False
    if getattr(method, "is_fp4_expert", False) or getattr(module, "_block_fp8_bf16_weight", None) is not None:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    scales = [parameter for name, parameter in parameters.items() if name.endswith("weight_scale_inv")]
    are_plain = all(
        scale.dtype == torch.float32 and scale.is_contiguous() and not getattr(scale, "format_ue8m0", False)
        for scale in scales
    )
    if not scales or not are_plain:
        return False
    find_runner = getattr(method, "get_moe_runner_backend", None)  # of experts
    runner = None if find_runner is None else find_runner(module)
    return runner is None or runner.value in PLAIN_EXPERT_RUNNERS


IMPORT_PATH = "megarl.engines.sglang.weight_update.weight_loader.load"
"""Import path of `load`, for SGLang's options `custom_weight_loader` and `load_format`."""


def load(model: nn.Module, named_tensors: list[tuple[Command, Tensor]]) -> None:
    """Execute commands. This is SGLang's custom weight loader; the tensors are placeholders."""
    for command, _ in named_tensors:
        reply = Reply(tp_rank())
        try:
            with torch.no_grad():
                _execute(model, command, reply)
        except WeightSyncError as e:
            reply.error = str(e)
        except Exception as e:  # noqa: BLE001 -- an uncaught error kills the engine and its host process
            reply.error = f"{type(e).__name__}: {e}"
        send_reply(reply, command)


def _execute(model: nn.Module, command: Command, reply: Reply) -> None:
    if command["op"] not in WRITERS:
        READERS[command["op"]](model, command, reply)
        return
    vote = CommitVote(tp_group(), checked_path(command["reply"], reply.rank))
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


@dataclass(frozen=True, slots=True)
class _NetworkPlan:
    """What this process receives over the network, and its connections."""

    receiver: TransferRank
    boxes: PlannedBoxes


_network: _NetworkPlan | None = None


def prepare(model: nn.Module, command: Command, reply: Reply) -> None:
    """Plan what to receive, and check it against the model; existing connections are closed."""
    global _network
    transfer_spec = pickle.loads(Path(command["transfer_spec"][reply.rank]).read_bytes())  # noqa: S301 -- written by this host
    if _network is not None:
        _network.receiver.close()
        _network = None
    receiver = TransferRank(transfer_spec, transfer_spec.engine_rank(command["engine"], reply.rank))
    boxes = make_planned_boxes(model, [each.slots for each in receiver.plan.rounds], command)
    _network = _NetworkPlan(receiver, boxes)


def connect(_: nn.Module, command: Command, __: Reply) -> None:
    """Connect with the other ranks, which all have to connect at the same time."""
    _require_network().receiver.connect(TransferGroup(**command["transfer_group"]))


def receive(model: nn.Module, command: Command, reply: Reply, vote: CommitVote) -> None:
    """Receive the planned boxes; write nothing if any rank of the engine cannot."""
    session, prepared = get_session(command["session"]), _require_network()
    is_complete = False
    try:
        prepared.boxes.refresh(model)
        session.boxes = prepared.boxes
        if not vote.all_ready(ready=True):
            return
        reply.wrote = True
        target = Parameters(prepared.boxes.tensors, next(model.parameters()).device)
        delta = None if command["delta"] is None else DeltaUpdate(**command["delta"])
        reply.result = asdict(prepared.receiver.run({}, target, delta))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        is_complete = True
    finally:
        if not is_complete:
            reset_session()
            prepared.receiver.close()  # so that the trainer does not wait for this rank


def _require_network() -> _NetworkPlan:
    if _network is None:
        raise WeightSyncError("this rank has no plan of what to receive: it needs `prepare` first")
    return _network


@dataclass(frozen=True, slots=True)
class _SharedPlan:
    """What this process receives from the trainer rank on its slot, and the connection with it."""

    boxes: PlannedBoxes
    rounds: tuple[int, ...]
    """Indices of the rounds that have boxes."""
    receiver: BoxReceiver
    mapped: MappedBuckets = field(default_factory=MappedBuckets)
    """The buckets of the latest sync that lie in host memory, which the trainer rank keeps for the next one."""


_shared: _SharedPlan | None = None


def prepare_boxes(model: nn.Module, command: Command, _: Reply) -> None:
    """Check the boxes that the command's trainer rank offers, and connect with it; an older connection is closed."""
    global _shared
    if _shared is not None:
        _shared.receiver.close()
        _shared = None
    offer = BoxOffer(**command["offer"])
    rounds = offer.read_slots()
    boxes = make_planned_boxes(model, rounds, command)
    _shared = _SharedPlan(boxes, tuple(i for i, slots in enumerate(rounds) if slots), BoxReceiver(offer))


def receive_boxes(model: nn.Module, command: Command, reply: Reply, vote: CommitVote) -> None:
    """Copy the boxes of all rounds as they come; copy nothing if any rank of the engine cannot."""
    session, prepared, is_complete = get_session(command["session"]), _require_shared(), False
    abort_file, mapped = Path(command["abort_file"]), prepared.mapped

    def check() -> None:
        if abort_file.exists():
            raise WeightSyncError(abort_file.read_text())

    try:
        prepared.boxes.refresh(model)
        session.boxes = prepared.boxes
        if not vote.all_ready(ready=True):
            return
        prepared.receiver.report_ready()
        codes: dict[int, Ints] | None = None
        if command["coded"]:
            lines = prepared.receiver.receive_codes(command["seconds"], check)
            codes = prepared.boxes.check_codes(lines)
        rounds = prepared.rounds if codes is None else tuple(codes)
        reply.wrote = bool(rounds)
        for index in rounds:
            bucket = prepared.receiver.receive(index, command["seconds"], check)
            if codes is None:
                prepared.boxes.copy_round(index, mapped.map(bucket))
            else:
                prepared.boxes.decode_round(index, mapped.map(bucket), codes[index])
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the sender reuses the bucket once it has the answer
            if index == rounds[-1]:
                mapped.end_sync()  # the sender frees its buckets on a GPU now
            prepared.receiver.acknowledge()
        is_complete = True
    except (WeightSyncError, OSError) as e:
        prepared.receiver.fail(str(e))
        raise
    finally:
        if not is_complete:
            reset_session()
            mapped.clear()
            prepared.receiver.close()  # so that the trainer does not wait for this rank


def _require_shared() -> _SharedPlan:
    if _shared is None:
        raise WeightSyncError("this rank does not know which boxes it receives: it needs `prepare_boxes` first")
    if not _shared.receiver.is_connected:
        sender = _shared.receiver.sender
        raise WeightSyncError(f"the connection with {sender} was closed when a sync failed: it needs `prepare_boxes`")
    return _shared


WRITERS: dict[str, Callable[[nn.Module, Command, Reply, CommitVote], None]] = {
    "write": _write,
    "receive": receive,
    "receive_boxes": receive_boxes,
    "finish": finish_update.finish,
}
"""Operations that may write parameters. Each checks first and writes only if all ranks are ready.

A rank that found no problem itself replies without an error, even if the vote fails.
"""

READERS: dict[str, Callable[[nn.Module, Command, Reply], None]] = {
    "prepare": prepare,
    "connect": connect,
    "prepare_boxes": prepare_boxes,
    "trace": finish_update.report_trace,
    "sum": finish_update.sum_weights,
    "repacking": _report_repacking,
    "release": finish_update.release,
    "dump": _dump,
}
"""Operations that do not write weights."""


def tp_rank() -> int:
    """Return the tensor-parallel rank of this scheduler process."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def tp_group() -> dist.ProcessGroup | None:
    """Return the gloo group of the engine's tensor-parallel ranks; None if there is one rank."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return None if group.world_size == 1 else group.cpu_group
