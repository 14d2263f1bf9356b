"""Writes boxes of weights from shared memory into the parameters of one TP rank.

write_boxes   check the round's boxes; if they are valid on every rank, copy them (`network_receive`: receive)
finish        check that the session's boxes cover the model; fill padding, compute derived values
hash_boxes    digests of the parameters by box, for bitwise comparison
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, TensorSpec, contains, extent, slices
from megarl.reshard.transfer.bucket import (
    BoxBucket,
    BoxSlot,
    digest,
    dtype_name,
    identify_memory,
    map_bucket,
    torch_dtype,
)
from megarl.rollout.sglang.weight_layout.coverage import Coverage
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, box_text, fold, join_names, trace_live
from megarl.rollout.sglang.weight_update.commit_vote import CommitVote
from megarl.rollout.sglang.weight_update.expected_tensors import read_expected_tensors
from megarl.rollout.sglang.weight_update.message_encoding import decode_boxes, encode_traces
from megarl.rollout.sglang.weight_update.messages import Command, Reply


@dataclass
class WriteSession:
    """What this process has written in the current update."""

    number: int = -1
    """Number of the update."""
    written: dict[tuple[str, int], Coverage] = field(default_factory=dict)
    """Written boxes by tensor name and number of dimensions."""
    mapped: dict[tuple[int | str, ...], Tensor] = field(default_factory=dict)
    """Mapped buckets by memory identity. They are reused: mapping a bucket costs as much as copying much of it."""

    def coverage(self, target: TargetTensor, box: Box) -> Coverage:
        """Return the coverage of the tensor folded to the number of dimensions of `box`."""
        return self.written.setdefault((target.name, len(box)), Coverage())


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A parameter or buffer of the model."""

    name: str
    """First name of the tensor; tied parameters have several."""
    tensor: Tensor


_session = WriteSession()
_traces: weakref.WeakKeyDictionary[nn.Module, EngineTrace] = weakref.WeakKeyDictionary()


def write_boxes(model: nn.Module, command: Command, reply: Reply, vote: CommitVote) -> None:
    """Copy the boxes of the command's bucket; reject them all if one is invalid on any rank."""
    session = get_session(command["session"])
    if command["bucket"] is None:
        vote.all_ready(ready=True)
        return
    bucket = decode_boxes(command["bucket"])
    key, size = identify_memory(bucket)
    if size < bucket.num_bytes:  # reading past the end of a mapping is a SIGBUS
        reply.error = f"{bucket.path} needs {bucket.num_bytes} bytes, got {size}"
        return
    if key not in session.mapped:
        session.mapped[key] = map_bucket(bucket)
    data, targets = session.mapped[key], find_targets(model)
    found: list[str] = []
    views: list[Tensor] = []
    for slot in bucket.slots:
        problem = find_box_problem(slot, targets, session) or _placement_problem(slot, bucket)
        if problem is not None:
            found.append(problem)
            continue
        target = targets[slot.local]
        session.coverage(target, slot.local_box).add(slot.local_box)
        views.append(fold(target.tensor, len(slot.local_box))[slices(slot.local_box)])
    if found:
        reply.error = join_names(found)
    if not vote.all_ready(ready=not found):
        reset_session()  # it contains boxes that were not written; the update has failed
        return
    reply.wrote = True
    for slot, view in zip(bucket.slots, views, strict=True):
        elements = data[slot.offset : slot.offset + slot.num_bytes].view(view.dtype)
        view.copy_(elements.view(view.shape), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the sender reuses the bucket once it has the reply


def finish(model: nn.Module, command: Command, reply: Reply, vote: CommitVote) -> None:
    """Complete the model: fill padding and compute derived values; raise if part of it was not written."""
    session, trace = get_session(command["session"]), _trace(model, command)
    session.mapped.clear()
    targets = find_targets(model)
    _check_derived(session, trace, set(command["arrived"]), targets)
    _check_complete(session, trace, set(command["arrived"]), targets)
    if not vote.all_ready(ready=True):
        return
    reply.wrote = True
    for pad in trace.padding:
        fold(targets[pad.local].tensor, len(pad.local_box))[slices(pad.local_box)].fill_(pad.value)
    post_load_weights: Callable[[], object] | None = getattr(model, "post_load_weights", None)
    if post_load_weights is not None:
        post_load_weights()


def report_trace(model: nn.Module, command: Command, reply: Reply) -> None:
    """Return the rank's trace in the reply."""
    reply.result = encode_traces([_trace(model, command)])


def hash_boxes(model: nn.Module, command: Command, reply: Reply) -> None:
    """Return the digests of the layout's pieces in the reply."""
    targets = find_targets(model)
    reply.result = [
        digest(fold(targets[p.local].tensor, len(p.local_box))[slices(p.local_box)]).hex()
        for p in _trace(model, command).layout.pieces
    ]


def get_session(number: int) -> WriteSession:
    """Return the session of update `number`; a new one if the last session belongs to another update."""
    global _session
    if _session.number != number:
        _session = WriteSession(number)
    return _session


def reset_session() -> None:
    """Discard the session; the update has ended."""
    global _session
    _session = WriteSession()


def _check_derived(
    session: WriteSession, trace: EngineTrace, arrived: set[str], targets: dict[str, TargetTensor]
) -> None:
    """Check that derived tensors were loaded with `load_weights`: boxes would leave computed values outdated."""
    missing = [name for name in trace.derived if name not in arrived]
    if missing:
        raise WeightSyncError(
            f"the engine computes values from {len(missing)} tensors, which need load_weights: {join_names(missing)}"
        )
    needs_loader = set(trace.derived)
    for piece in trace.layout.pieces:
        if piece.tensor in needs_loader:
            boxes = session.coverage(targets[piece.local], piece.local_box).overlapping(piece.local_box)
            if boxes:
                raise WeightSyncError(
                    f"the engine computes values from {piece.tensor}, which needs load_weights only, got also "
                    f"box {box_text(boxes[0])} of {piece.local}"
                )


def _check_complete(
    session: WriteSession, trace: EngineTrace, arrived: set[str], targets: dict[str, TargetTensor]
) -> None:
    for piece in trace.layout.pieces:
        if piece.tensor in arrived:
            continue
        gap = session.coverage(targets[piece.local], piece.local_box).first_gap(piece.local_box)
        if gap is not None:
            raise WeightSyncError(f"{piece.local} was not written at {box_text(gap)} (of {piece.tensor})")


def _trace(model: nn.Module, command: Command) -> EngineTrace:
    if model not in _traces:
        expected = read_expected_tensors(command["model_path"])
        tensors = {name: TensorSpec(e.shape, command["dtype"]) for name, e in expected.items() if e.required}
        _traces[model] = trace_live(model, tensors)
    return _traces[model]


def find_targets(model: nn.Module) -> dict[str, TargetTensor]:
    """Return parameters and buffers by each of their names. Not cached: SGLang may reallocate parameters."""
    first: dict[int, str] = {}
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found[name] = TargetTensor(first.setdefault(id(p), name), p.data)
    for name, buffer in model.named_buffers():
        found[name] = TargetTensor(name, buffer)
    return found


def find_box_problem(slot: BoxSlot, targets: dict[str, TargetTensor], session: WriteSession) -> str | None:
    """Return why the box must not be written; None if it is valid."""
    if slot.local not in targets:
        return f"{slot.local} is no parameter of the engine"
    target = targets[slot.local]
    what = f"{slot.local} {box_text(slot.local_box)}"
    if len(slot.local_box) > target.tensor.dim():
        return f"{what} has {len(slot.local_box)} dimensions, the parameter {target.tensor.dim()}"
    folded = fold(target.tensor, len(slot.local_box))
    full_box = tuple((0, n) for n in folded.shape)
    if min(extent(slot.local_box), default=1) < 1 or not contains(full_box, slot.local_box):
        return f"{what} does not lie in the parameter, which has shape {list(folded.shape)}"
    if torch_dtype(slot.dtype) != folded.dtype:
        return f"{what} needs dtype {dtype_name(folded.dtype)}, got {slot.dtype}"
    others = session.coverage(target, slot.local_box).overlapping(slot.local_box)
    return f"{what} was written before, as part of {box_text(others[0])}" if others else None


def _placement_problem(slot: BoxSlot, bucket: BoxBucket) -> str | None:
    """Return why the box's position in the bucket is invalid; None if it is valid."""
    what, itemsize = f"{slot.local} {box_text(slot.local_box)}", torch_dtype(slot.dtype).itemsize
    if slot.offset % itemsize or slot.offset < 0:
        return f"{what} lies at byte {slot.offset} of the bucket, which is no multiple of {itemsize}"
    if slot.offset + slot.num_bytes > bucket.num_bytes:
        return f"{what} ends at byte {slot.offset + slot.num_bytes}, the bucket at {bucket.num_bytes}"
    return None
