"""Boxes of weights, straight from shared memory into the parameters of one TP rank.

write_boxes   check the round's boxes; if they are right, in every rank, copy them (`network_receive`: receive)
finish        check that the session's boxes leave no hole; pad, and have the model compute what it derives
hash_boxes    what the parameters hold, box by box, to compare bit by bit
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

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
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, box_text, fold, listing, trace_live
from megarl.rollout.sglang.weight_update.commit_vote import Ballot
from megarl.rollout.sglang.weight_update.expected_tensors import read_manifest
from megarl.rollout.sglang.weight_update.message_encoding import decode_boxes, encode_traces
from megarl.rollout.sglang.weight_update.messages import Order, Reply


@dataclass
class Session:
    """What this process has written since the update began."""

    number: int = -1
    written: dict[tuple[str, int], Coverage] = field(default_factory=dict)
    """By tensor and number of dimensions."""
    mapped: dict[tuple[int | str, ...], Tensor] = field(default_factory=dict)
    """Buckets by what tells their memory apart: mapping one anew costs as much as copying a good part of it."""

    def coverage(self, target: Target, box: Box) -> Coverage:
        """Of the tensor, seen with as many dimensions as the box has."""
        return self.written.setdefault((target.name, len(box)), Coverage())


@dataclass(frozen=True, slots=True)
class Target:
    """One of the model's tensors."""

    name: str
    """The first of its names: tied parameters have several."""
    tensor: Tensor


_session = Session()
_traces: weakref.WeakKeyDictionary[nn.Module, EngineTrace] = weakref.WeakKeyDictionary()


def write_boxes(model: nn.Module, order: Order, reply: Reply, ballot: Ballot) -> None:
    """Copy the boxes of the order's bucket; refuse them all if one is wrong, here or in another rank."""
    session = open_session(order["session"])
    if order["bucket"] is None:
        ballot.agree(ready=True)
        return
    bucket = decode_boxes(order["bucket"])
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
        problem = box_problem(slot, targets, session) or _misplaced(slot, bucket)
        if problem is not None:
            found.append(problem)
            continue
        target = targets[slot.local]
        session.coverage(target, slot.local_box).add(slot.local_box)
        views.append(fold(target.tensor, len(slot.local_box))[slices(slot.local_box)])
    if found:
        reply.error = listing(found)
    if not ballot.agree(ready=not found):
        forget_session()  # it counts boxes that are not written; the update is over
        return
    reply.wrote = True
    for slot, view in zip(bucket.slots, views, strict=True):
        elements = data[slot.offset : slot.offset + slot.num_bytes].view(view.dtype)
        view.copy_(elements.view(view.shape), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the sender reuses the bucket once it has the reply


def finish(model: nn.Module, order: Order, reply: Reply, ballot: Ballot) -> None:
    """Make the model whole, or name the first hole."""
    session, trace = open_session(order["session"]), _trace(model, order)
    session.mapped.clear()
    targets = find_targets(model)
    _check_derived(session, trace, set(order["arrived"]), targets)
    _check_whole(session, trace, set(order["arrived"]), targets)
    if not ballot.agree(ready=True):
        return
    reply.wrote = True
    for pad in trace.padding:
        fold(targets[pad.local].tensor, len(pad.local_box))[slices(pad.local_box)].fill_(pad.value)
    post_load_weights: Any = getattr(model, "post_load_weights", None)
    if post_load_weights is not None:
        post_load_weights()


def tell_trace(model: nn.Module, order: Order, reply: Reply) -> None:
    """The rank's trace."""
    reply.result = encode_traces([_trace(model, order)])


def hash_boxes(model: nn.Module, order: Order, reply: Reply) -> None:
    """The digests of the layout's pieces."""
    targets = find_targets(model)
    reply.result = [
        digest(fold(targets[p.local].tensor, len(p.local_box))[slices(p.local_box)]).hex()
        for p in _trace(model, order).layout.pieces
    ]


def open_session(number: int) -> Session:
    """What was written in the update of this number; nothing yet, if another one came before."""
    global _session
    if _session.number != number:
        _session = Session(number)
    return _session


def forget_session() -> None:
    """The update is over."""
    global _session
    _session = Session()


def _check_derived(session: Session, trace: EngineTrace, arrived: set[str], targets: dict[str, Target]) -> None:
    """Boxes of these tensors would leave the engine with values that it computed from other ones."""
    missing = [name for name in trace.derived if name not in arrived]
    if missing:
        raise WeightSyncError(
            f"the engine computes values of its own from {len(missing)} tensors, which need load_weights: "
            f"{listing(missing)}"
        )
    needs_loader = set(trace.derived)
    for piece in trace.layout.pieces:
        if piece.tensor in needs_loader:
            boxes = session.coverage(targets[piece.local], piece.local_box).meeting(piece.local_box)
            if boxes:
                raise WeightSyncError(
                    f"the engine computes values of its own from {piece.tensor}, which needs load_weights alone, got "
                    f"the box {box_text(boxes[0])} of {piece.local} too"
                )


def _check_whole(session: Session, trace: EngineTrace, arrived: set[str], targets: dict[str, Target]) -> None:
    for piece in trace.layout.pieces:
        if piece.tensor in arrived:
            continue
        hole = session.coverage(targets[piece.local], piece.local_box).missing(piece.local_box)
        if hole is not None:
            raise WeightSyncError(f"{piece.local} was not written at {box_text(hole)} (of {piece.tensor})")


def _trace(model: nn.Module, order: Order) -> EngineTrace:
    if model not in _traces:
        manifest = read_manifest(order["model_path"])
        tensors = {name: TensorSpec(e.shape, order["dtype"]) for name, e in manifest.items() if e.required}
        _traces[model] = trace_live(model, tensors)
    return _traces[model]


def find_targets(model: nn.Module) -> dict[str, Target]:
    """By every name. Looked up anew each time: SGLang may have given a parameter other memory."""
    first: dict[int, str] = {}
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found[name] = Target(first.setdefault(id(p), name), p.data)
    for name, buffer in model.named_buffers():
        found[name] = Target(name, buffer)
    return found


def box_problem(slot: BoxSlot, targets: dict[str, Target], session: Session) -> str | None:
    """Why the box must not be written; None: nothing speaks against it."""
    if slot.local not in targets:
        return f"{slot.local} is no parameter of the engine"
    target = targets[slot.local]
    what = f"{slot.local} {box_text(slot.local_box)}"
    if len(slot.local_box) > target.tensor.dim():
        return f"{what} has {len(slot.local_box)} dimensions, the parameter {target.tensor.dim()}"
    folded = fold(target.tensor, len(slot.local_box))
    whole = tuple((0, n) for n in folded.shape)
    if min(extent(slot.local_box), default=1) < 1 or not contains(whole, slot.local_box):
        return f"{what} does not lie in the parameter, which has shape {list(folded.shape)}"
    if torch_dtype(slot.dtype) != folded.dtype:
        return f"{what} needs dtype {dtype_name(folded.dtype)}, got {slot.dtype}"
    others = session.coverage(target, slot.local_box).meeting(slot.local_box)
    return f"{what} was written before, as part of {box_text(others[0])}" if others else None


def _misplaced(slot: BoxSlot, bucket: BoxBucket) -> str | None:
    """What is wrong with where the box lies in the bucket."""
    what, itemsize = f"{slot.local} {box_text(slot.local_box)}", torch_dtype(slot.dtype).itemsize
    if slot.offset % itemsize or slot.offset < 0:
        return f"{what} lies at byte {slot.offset} of the bucket, which is no multiple of {itemsize}"
    if slot.offset + slot.num_bytes > bucket.num_bytes:
        return f"{what} ends at byte {slot.offset + slot.num_bytes}, the bucket at {bucket.num_bytes}"
    return None
