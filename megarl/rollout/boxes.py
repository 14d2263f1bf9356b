"""Boxes of weights, straight from shared memory into the parameters of one TP rank.

write_boxes   check the round's boxes; if all are right, copy them
finish        check that the session's boxes leave no hole; pad, and have the model compute what it derives
hash_boxes    what the parameters hold, box by box, to compare bit by bit
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megarl.errors import WeightSyncError
from megarl.reshard.bucket import BoxBucket, BoxSlot, digest, dtype_name, map_bucket, torch_dtype
from megarl.reshard.layout import Box, TensorSpec, contains, extent, slices
from megarl.rollout.coverage import Coverage
from megarl.rollout.encoding import decode_boxes, encode_traces
from megarl.rollout.engine_trace import EngineTrace, box_text, fold, listing, trace_live
from megarl.rollout.manifest import read_manifest
from megarl.rollout.orders import Order, Reply


@dataclass
class _Session:
    """What this process has written since the update began."""

    number: int = -1
    written: dict[tuple[str, int], Coverage] = field(default_factory=dict)
    """By tensor and number of dimensions."""
    mapped: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """Buckets by device, inode and size: mapping one anew costs as much as copying a good part of it."""

    def coverage(self, target: _Target, box: Box) -> Coverage:
        return self.written.setdefault((target.name, len(box)), Coverage())


@dataclass(frozen=True, slots=True)
class _Target:
    """One of the model's tensors."""

    name: str
    """The first of its names: tied parameters have several."""
    tensor: Tensor


_session = _Session()
_traces: weakref.WeakKeyDictionary[nn.Module, EngineTrace] = weakref.WeakKeyDictionary()


def write_boxes(model: nn.Module, order: Order, reply: Reply) -> None:
    """Copy the boxes of the order's bucket; refuse them all if one is wrong."""
    session = _open_session(order["session"])
    if order["bucket"] is None:
        return
    bucket = decode_boxes(order["bucket"])
    stat = os.stat(bucket.path)
    found = [] if stat.st_size >= bucket.num_bytes else [_too_small(bucket, stat.st_size)]
    targets = _targets(model)
    taken: list[tuple[Coverage, Box]] = []
    views: list[Tensor] = []
    for slot in bucket.slots:
        problem = _problem(slot, bucket, targets, session)
        if problem is not None:
            found.append(problem)
            continue
        target = targets[slot.local]
        coverage = session.coverage(target, slot.local_box)
        coverage.add(slot.local_box)
        taken.append((coverage, slot.local_box))
        views.append(fold(target.tensor, len(slot.local_box))[slices(slot.local_box)])
    if found:
        for coverage, box in taken:
            coverage.remove(box)
        reply.error = listing(found)
        return
    data = session.mapped.setdefault((stat.st_dev, stat.st_ino, bucket.num_bytes), map_bucket(bucket))
    reply.wrote = True
    for slot, view in zip(bucket.slots, views, strict=True):
        elements = data[slot.offset : slot.offset + slot.num_bytes].view(view.dtype)
        view.copy_(elements.view(view.shape), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the sender reuses the bucket once it has the reply


def finish(model: nn.Module, order: Order, reply: Reply) -> None:
    """Make the model whole, or name the first hole."""
    session, trace = _open_session(order["session"]), _trace(model, order)
    session.mapped.clear()
    arrived = set(order["arrived"])
    through_loader = [name for name in trace.derived if name not in arrived]
    if through_loader:
        raise WeightSyncError(
            f"the engine computes values of its own from {len(through_loader)} tensors, which need load_weights: "
            f"{listing(through_loader)}"
        )
    targets = _targets(model)
    for piece in trace.layout.pieces:
        if piece.tensor in arrived:
            continue
        hole = session.coverage(targets[piece.local], piece.local_box).missing(piece.local_box)
        if hole is not None:
            raise WeightSyncError(f"{piece.local} was not written at {box_text(hole)} (of {piece.tensor})")
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
    targets = _targets(model)
    reply.result = [
        digest(fold(targets[p.local].tensor, len(p.local_box))[slices(p.local_box)]).hex()
        for p in _trace(model, order).layout.pieces
    ]


def _open_session(number: int) -> _Session:
    global _session
    if _session.number != number:
        _session = _Session(number)
    return _session


def _trace(model: nn.Module, order: Order) -> EngineTrace:
    if model not in _traces:
        manifest = read_manifest(order["model_path"])
        tensors = {name: TensorSpec(e.shape, order["dtype"]) for name, e in manifest.items() if e.required}
        _traces[model] = trace_live(model, tensors)
    return _traces[model]


def _targets(model: nn.Module) -> dict[str, _Target]:
    """By every name. Looked up anew each time: SGLang may have given a parameter other memory."""
    first: dict[int, str] = {}
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found[name] = _Target(first.setdefault(id(p), name), p.data)
    for name, buffer in model.named_buffers():
        found[name] = _Target(name, buffer)
    return found


def _problem(slot: BoxSlot, bucket: BoxBucket, targets: dict[str, _Target], session: _Session) -> str | None:
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
    if slot.offset % folded.itemsize or slot.offset < 0:
        return f"{what} lies at byte {slot.offset} of the bucket, which is no multiple of {folded.itemsize}"
    if slot.offset + slot.num_bytes > bucket.num_bytes:
        return f"{what} ends at byte {slot.offset + slot.num_bytes}, the bucket at {bucket.num_bytes}"
    others = session.coverage(target, slot.local_box).meeting(slot.local_box)
    return f"{what} was written before, as part of {box_text(others[0])}" if others else None


def _too_small(bucket: BoxBucket, size: int) -> str:
    # reading past the end of a mapping is a SIGBUS
    return f"{bucket.path} needs {bucket.num_bytes} bytes, got {size}"
