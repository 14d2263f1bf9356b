"""Loads weights into an SGLang model. SGLang calls `load` in every tensor-parallel rank of the engine.

    engine host                                      scheduler process of rank r
    command (plain data) --- SGLang's update call ---> load(model, [(command, placeholder)])
                                                       WRITERS[op]: check <-- vote --> the other ranks' checks
                                                                    write, if all ranks can
    reply file of rank r <---------------------------- READERS[op]: no vote

SGLang's own answer is not reliable: it is `Success` after a caught error, and an uncaught error kills the engine. So a
command names the file for the reply, and `load` never raises.

Modules whose weights SGLang changes after it has loaded them are refused: SGLang calls `process_weights_after_loading`
of every module's `quant_method` at the end of a load and of each weight update. For plain weights it does nothing. Some
kernels need another layout, and the call then packs, permutes or quantizes the parameters: boxes of the model's layout
do not fit any more, and if an update is aborted, packing again what was never unpacked gives other weights.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.engines.sglang.weight_layout.engine_trace import (
    TRANSPOSED,
    EngineTrace,
    box_text,
    encode_traces,
    fold,
    model_tensors,
    trace_live,
)
from megarl.engines.sglang.weight_update.messages import Command, Reply, checked_path, read_bucket, send_reply
from megarl.engines.sglang.weight_update.planned_boxes import (
    PlannedBoxes,
    find_bucket_problems,
    find_targets,
    read_expected_tensors,
)
from megarl.errors import WeightSyncError
from megarl.model_files.weight_index import stored_shape
from megarl.reshard.layout.layout import Box, TensorSpec, WeightNeeds, full_local, slices
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.box_channel import BoxOffer, BoxReceiver
from megarl.reshard.transfer.bucket import BoxSlot, MappedBuckets, Parameters, open_bucket, torch_dtype
from megarl.reshard.transfer.process_groups import TransferGroup
from megarl.reshard.transfer.weight_sums import sum_box

PLAIN_EXPERT_RUNNERS = frozenset({"triton", "deep_gemm", "cutlass"})
"""SGLang's backends for experts in FP8 that read the weights as they are loaded, unless DeepGEMM changes the scales."""


def _report_repacking(model: nn.Module, _: Command, reply: Reply) -> None:
    """Reply `name (class of its quant_method)` for each module whose weights are not kept as they are loaded."""
    reply.result = [
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


def all_ready(ready: bool, group: dist.ProcessGroup | None, checked_file: Path) -> bool:
    """Vote, and return whether every rank is ready. Every rank must vote exactly once; the others wait for it.

    The timeout is that of the process group. If a rank dies, the engine ends too; a stopped rank is waited for. A
    shorter timeout would break the group's connections, and with them an engine that may recover.

    Args:
        group: process group of the TP ranks for CPU tensors; None for a single rank.
        checked_file: created when this rank starts to wait for the others, so that the host knows who is missing.
    """
    if group is None:
        return ready
    with contextlib.suppress(OSError):  # a failure must not prevent this rank from voting
        checked_file.touch()
    vote = torch.tensor([ready], dtype=torch.uint8)
    dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
    return bool(vote.item())


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
    with contextlib.closing(WRITERS[command["op"]](model, command, reply)) as steps:
        is_ready = False
        try:
            next(steps)
            is_ready = True
        finally:
            may_write = all_ready(is_ready, tp_group(), checked_path(command["reply"], reply.rank))
        if may_write:
            next(steps, None)


def _write(model: Any, command: Command, reply: Reply) -> Generator[None]:
    bucket = read_bucket(command["bucket"])
    expected = read_expected_tensors(command["model_path"])
    found = find_bucket_problems(bucket, expected, command["dtype"])
    if found:
        raise WeightSyncError("; ".join(found))
    tensors = open_bucket(bucket)
    yield
    reply.wrote = True
    model.load_weights(list(tensors.items()))
    _synchronize()  # the sender reuses the bucket once it has the reply


def _dump(model: nn.Module, command: Command, reply: Reply) -> None:
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters(remove_duplicate=False)}
    torch.save(parameters, Path(command["directory"]) / f"rank{reply.rank}.pt")
    buffers = {name: b.detach().cpu() for name, b in model.named_buffers(remove_duplicate=False)}
    torch.save(buffers, Path(command["directory"]) / f"rank{reply.rank}.buffers.pt")


_traces: weakref.WeakKeyDictionary[nn.Module, EngineTrace] = weakref.WeakKeyDictionary()
_others: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[torch.Size, int | None]]] = weakref.WeakKeyDictionary()
"""By model, what no update writes when it was traced: by name, the tensor's shape and the sum of its elements."""


def _trace(model: nn.Module, command: Command) -> EngineTrace:
    if model not in _traces:
        expected = read_expected_tensors(command["model_path"])
        untrained = {name for name, e in expected.items() if e.is_untrained}
        traced = {name: e for name, e in expected.items() if e.required or e.is_untrained}
        tensors = {name: TensorSpec(e.shape, command["dtype"]) for name, e in traced.items()}
        trace = _traces[model] = trace_live(model, tensors).without(untrained)
        others = {name: tensor for name, tensor in _others_of(model, trace).items() if tensor.numel()}
        _others[model] = {name: (tensor.shape, _sum_first(tensor, tensor.shape)) for name, tensor in others.items()}
    return _traces[model]


def _report_trace(model: nn.Module, command: Command, reply: Reply) -> None:
    """Return the rank's trace in the reply."""
    reply.result = base64.b64encode(encode_traces([_trace(model, command)])).decode()


def _sum_weights(model: nn.Module, command: Command, reply: Reply) -> None:
    """Return the sums of the layout's pieces, and the names of changed tensors that no update writes, in the reply."""
    targets, trace = find_targets(model), _trace(model, command)
    sums = [sum_box(_view(targets, piece.local, piece.local_box), piece.box) for piece in trace.layout.pieces]
    others = _others_of(model, trace)
    reply.result = {
        "sums": torch.stack(sums).tolist() if sums else [],
        "changed": [
            name
            for name, (shape, total) in _others[model].items()
            if name not in others or _sum_first(others[name], shape) != total
        ],
    }


def _view(targets: Mapping[str, Tensor], local: str, local_box: Box) -> Tensor:
    """Return the box of a parameter or buffer, with as many dimensions as the box has."""
    return fold(targets[local], len(local_box))[slices(local_box)]


def _others_of(model: nn.Module, trace: EngineTrace) -> dict[str, Tensor]:
    """Return the parameters and buffers that no update writes, by name."""
    local = {piece.local for piece in trace.layout.pieces} | {pad.local for pad in trace.padding} | trace.computed
    written = {name.removesuffix(TRANSPOSED) for name in local}
    return {name: tensor for name, tensor in model_tensors(model).items() if name not in written}


def _sum_first(tensor: Tensor, shape: torch.Size) -> int | None:
    """Return the sum of the first elements, None if there are fewer: SGLang appends rows to caches of RoPE's angles."""
    box = tuple((0, length) for length in shape)
    first = tensor[slices(box)] if tensor.dim() == len(box) else tensor
    return int(sum_box(first, box)) if first.shape == shape else None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this process receives in every update, and the connection over which it comes."""

    boxes: PlannedBoxes
    receiver: TransferRank | BoxReceiver
    mapped: MappedBuckets = field(default_factory=MappedBuckets)
    """The buckets of the latest sync that lie in host memory, which the trainer rank keeps for the next one."""


_plan: _Plan | None = None


def prepare(model: nn.Module, command: Command, reply: Reply) -> None:
    """Plan what to receive, and check it against the model; existing connections are closed."""
    global _plan
    if _plan is not None:
        _plan.receiver.close()
        _plan = None
    if "offers" in command:
        offer = BoxOffer(**command["offers"][reply.rank])
        boxes = make_planned_boxes(model, offer.read_slots(), command)
        _plan = _Plan(boxes, BoxReceiver(offer))
        return
    transfer_spec = pickle.loads(Path(command["transfer_spec"][reply.rank]).read_bytes())  # noqa: S301 -- written by this host
    receiver = TransferRank(transfer_spec, transfer_spec.engine_rank(command["engine"], reply.rank))
    _plan = _Plan(make_planned_boxes(model, [each.slots for each in receiver.plan.rounds], command), receiver)


def connect(_: nn.Module, command: Command, __: Reply) -> None:
    """Connect with the other ranks, which all have to connect at the same time."""
    receiver = _require_plan().receiver
    assert isinstance(receiver, TransferRank), "boxes of a trainer rank on the same slot come over its own socket"
    receiver.connect(TransferGroup(**command["transfer_group"]))


def receive(model: nn.Module, command: Command, reply: Reply) -> Generator[None]:
    """Receive the planned boxes and complete the model."""
    plan, is_complete = _require_plan(), False
    delta = None if command["delta"] is None else DeltaUpdate(**command["delta"])
    try:
        plan.boxes.refresh(model)
        yield
        if isinstance(plan.receiver, BoxReceiver):
            _copy_rounds(plan, plan.receiver, command, reply, is_delta=delta is not None and delta.base is not None)
        else:
            reply.wrote = True
            reply.result = asdict(plan.receiver.run({}, Parameters(plan.boxes.tensors), delta))
            _synchronize()
        is_complete = True
    except (WeightSyncError, OSError) as e:
        if isinstance(plan.receiver, BoxReceiver):
            plan.receiver.fail(str(e))
        raise
    finally:
        if not is_complete:
            plan.mapped.clear()
            plan.receiver.close()  # so that the trainer does not wait for this rank
    reply.wrote = True
    _complete(model, plan.boxes, command)


def _copy_rounds(plan: _Plan, receiver: BoxReceiver, command: Command, reply: Reply, *, is_delta: bool) -> None:
    """Copy the boxes of all rounds as they come; in a delta sync, decode the elements that the trainer rank lists."""
    boxes, seconds, abort_file = plan.boxes, command["seconds"], Path(command["abort_file"])

    def check() -> None:
        if abort_file.exists():
            raise WeightSyncError(abort_file.read_text())

    receiver.report_ready()
    rounds = boxes.check_codes(receiver.receive_codes(seconds, check)) if is_delta else boxes.all_rounds()
    reply.wrote = bool(rounds)
    for number, (index, lines) in enumerate(rounds.items(), 1):
        boxes.write_round(index, plan.mapped.map(receiver.receive(index, seconds, check)), lines)
        _synchronize()  # the sender reuses the bucket once it has the answer
        if number == len(rounds):
            plan.mapped.end_sync()  # the sender frees its buckets on a GPU now
        receiver.acknowledge()


def make_planned_boxes(model: nn.Module, rounds: Sequence[Sequence[BoxSlot]], command: Command) -> PlannedBoxes:
    """Check the boxes of all rounds, and allocate the tensors that are received in full.

    Raises:
        WeightSyncError: a box does not fit the model, two overlap, one belongs to a parameter from which the engine
            computes values, which would be outdated, or a part of the model is in none.
    """
    trace, device = _trace(model, command), next(model.parameters()).device
    # also tensors from which other TP ranks alone compute values come in full
    locals_ = {*map(full_local, trace.derived), *(slot.local for slots in rounds for slot in slots)}
    specs = {name: spec for name, spec in trace.layout.tensors.items() if full_local(name) in locals_}
    full = {n: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device) for n, spec in specs.items()}
    boxes = PlannedBoxes(model, rounds, full)
    for piece in (piece for piece in trace.layout.pieces if piece.tensor in specs):
        found = boxes.written[piece.local, len(piece.local_box)].overlapping(piece.local_box)
        if found:
            raise WeightSyncError(
                f"the engine computes values from {piece.tensor}, which needs to come in full, got "
                f"box {box_text(found[0])} of {piece.local}"
            )
    (needed,) = WeightNeeds(layouts=(trace.layout,), full_tensors=tuple(specs)).received()
    for piece in needed.pieces:
        gap = boxes.written[piece.local, len(piece.local_box)].first_gap(piece.local_box)
        if gap is not None:
            raise WeightSyncError(f"{piece.local} is not written at {box_text(gap)} (of {piece.tensor})")
    return boxes


def _complete(model: Any, boxes: PlannedBoxes, command: Command) -> None:
    """Complete the model after all boxes were received: load full tensors, fill padding, compute derived values.

    Without a vote: SGLang's loaders do not communicate, so that no TP rank waits for one that has failed.
    """
    if boxes.full_tensors:
        model.load_weights([(n, t.view(stored_shape(n, tuple(t.shape)))) for n, t in boxes.full_tensors.items()])
    targets = find_targets(model)
    for pad in _trace(model, command).padding:
        _view(targets, pad.local, pad.local_box).fill_(pad.value)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def _require_plan() -> _Plan:
    if _plan is None:
        raise WeightSyncError("this rank does not know which boxes it receives: it needs `prepare` first")
    if isinstance(_plan.receiver, BoxReceiver) and not _plan.receiver.is_connected:
        sender = _plan.receiver.sender
        raise WeightSyncError(f"the connection with {sender} was closed when a sync failed: it needs `prepare`")
    return _plan


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


WRITERS: dict[str, Callable[[nn.Module, Command, Reply], Generator[None]]] = {"write": _write, "receive": receive}
"""Operations that may write parameters. Each checks, yields, and is resumed to write only if all ranks are ready.

A rank that found no problem itself replies without an error, even if the vote fails.
"""

READERS: dict[str, Callable[[nn.Module, Command, Reply], None]] = {
    "prepare": prepare,
    "connect": connect,
    "trace": _report_trace,
    "sum": _sum_weights,
    "repacking": _report_repacking,
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
