"""What a weight update is checked against in one TP rank, and how it ends.

make_planned_boxes  check that the boxes of a sync are all that the rank needs
complete_model      load tensors that came in full, fill padding, compute derived values
report_trace        the layout of the rank's weights
sum_weights         sums of the parameters by box, which are compared after each update

The TP ranks of an engine vote: a rank writes weights only if all ranks can.

rank 0: check -- yes --. rank 1: check -- no ---+--> minimum of all votes: no rank writes
"""

from __future__ import annotations

import base64
import contextlib
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megarl.engines.sglang.weight_layout.engine_trace import (
    TRANSPOSED,
    EngineTrace,
    box_text,
    encode_traces,
    fold,
    model_tensors,
    trace_live,
)
from megarl.engines.sglang.weight_update.messages import Command, Reply
from megarl.engines.sglang.weight_update.planned_boxes import (
    PlannedBoxes,
    find_targets,
    read_expected_tensors,
)
from megarl.errors import WeightSyncError
from megarl.model_files.weight_index import stored_shape
from megarl.reshard.layout.layout import Box, TensorSpec, WeightNeeds, slices
from megarl.reshard.transfer.bucket import BoxSlot, torch_dtype
from megarl.reshard.transfer.weight_sums import sum_box


class CommitVote:
    """One rank's part in one vote. Every rank must vote exactly once; otherwise the others wait for it."""

    def __init__(self, group: dist.ProcessGroup | None, checked_file: Path) -> None:
        """Args:
        group: process group of the TP ranks for CPU tensors; None for a single rank.
        checked_file: created when this rank starts to wait for the others, so that the host knows who is missing.
        """
        self._group, self._checked_file = group, checked_file
        self.has_voted = False

    def all_ready(self, ready: bool) -> bool:
        """Vote, and return whether every rank is ready.

        The timeout is that of the process group. If a rank dies, the engine ends too; a stopped rank is waited for. A
        shorter timeout would break the group's connections, and with them an engine that may recover.
        """
        assert not self.has_voted, "a rank must vote only once"
        self.has_voted = True
        if self._group is None:
            return ready
        with contextlib.suppress(OSError):  # a failure must not prevent this rank from voting
            self._checked_file.touch()
        vote = torch.tensor([ready], dtype=torch.uint8)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())


_traces: weakref.WeakKeyDictionary[nn.Module, EngineTrace] = weakref.WeakKeyDictionary()
_others: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Box, int]]] = weakref.WeakKeyDictionary()
"""By model, the sums of what no update writes when it was traced: by name, the box of the whole tensor and its sum."""


def complete_model(model: Any, boxes: PlannedBoxes, command: Command) -> None:
    """Complete the model after all boxes were received: load full tensors, fill padding, compute derived values."""
    if boxes.full_tensors:
        model.load_weights([(n, t.view(stored_shape(n, tuple(t.shape)))) for n, t in boxes.full_tensors.items()])
    targets = find_targets(model)
    for pad in _trace(model, command).padding:
        _view(targets, pad.local, pad.local_box).fill_(pad.value)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def report_trace(model: nn.Module, command: Command, reply: Reply) -> None:
    """Return the rank's trace in the reply."""
    reply.result = base64.b64encode(encode_traces([_trace(model, command)])).decode()


def sum_weights(model: nn.Module, command: Command, reply: Reply) -> None:
    """Return the sums of the layout's pieces, and the names of changed tensors that no update writes, in the reply."""
    targets, trace = find_targets(model), _trace(model, command)
    sums = [sum_box(_view(targets, piece.local, piece.local_box), piece.box) for piece in trace.layout.pieces]
    others = _others_of(model, trace)
    reply.result = {
        "sums": torch.stack(sums).tolist() if sums else [],
        "changed": [
            name
            for name, (box, total) in _others[model].items()
            if name not in others or _sum_first(others[name], box) != total
        ],
    }


def _view(targets: Mapping[str, torch.Tensor], local: str, local_box: Box) -> torch.Tensor:
    """Return the box of a parameter or buffer, with as many dimensions as the box has."""
    return fold(targets[local], len(local_box))[slices(local_box)]


def _others_of(model: nn.Module, trace: EngineTrace) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that no update writes, by name."""
    local = {piece.local for piece in trace.layout.pieces} | {pad.local for pad in trace.padding} | trace.computed
    written = {name.removesuffix(TRANSPOSED) for name in local}
    return {name: tensor for name, tensor in model_tensors(model).items() if name not in written}


def _sum_first(tensor: torch.Tensor, box: Box) -> int | None:
    """Return the sum of the first elements, None if there are fewer: SGLang appends rows to caches of RoPE's angles."""
    if tensor.dim() != len(box) or any(size < stop for size, (_, stop) in zip(tensor.shape, box, strict=True)):
        return None
    return int(sum_box(tensor[slices(box)], box))


def make_planned_boxes(model: nn.Module, rounds: Sequence[Sequence[BoxSlot]], command: Command) -> PlannedBoxes:
    """Check the boxes of all rounds, and allocate the tensors that are received in full.

    Raises:
        WeightSyncError: a box does not fit the model, two overlap, one belongs to a parameter from which the engine
            computes values, which would be outdated, or a part of the model is in none.
    """
    trace, device = _trace(model, command), next(model.parameters()).device
    specs = {name: trace.layout.tensors[name] for name in trace.derived}
    full = {n: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device) for n, spec in specs.items()}
    boxes = PlannedBoxes(model, rounds, full)
    for piece in (piece for piece in trace.layout.pieces if piece.tensor in specs):
        found = boxes.written[piece.local, len(piece.local_box)].overlapping(piece.local_box)
        if found:
            raise WeightSyncError(
                f"the engine computes values from {piece.tensor}, which needs to come in full, got "
                f"box {box_text(found[0])} of {piece.local}"
            )
    (needed,) = WeightNeeds(layouts=(trace.layout,), full_tensors=trace.derived).received()
    for piece in needed.pieces:
        gap = boxes.written[piece.local, len(piece.local_box)].first_gap(piece.local_box)
        if gap is not None:
            raise WeightSyncError(f"{piece.local} is not written at {box_text(gap)} (of {piece.tensor})")
    return boxes


def _trace(model: nn.Module, command: Command) -> EngineTrace:
    if model not in _traces:
        expected = read_expected_tensors(command["model_path"])
        untrained = {name for name, e in expected.items() if e.is_untrained}
        traced = {name: e for name, e in expected.items() if e.required or e.is_untrained}
        tensors = {name: TensorSpec(e.shape, command["dtype"]) for name, e in traced.items()}
        trace = _traces[model] = trace_live(model, tensors).without(untrained)
        boxes = {
            name: (tuple((0, length) for length in tensor.shape), tensor)
            for name, tensor in _others_of(model, trace).items()
            if tensor.numel()
        }
        _others[model] = {name: (box, int(sum_box(tensor, box))) for name, (box, tensor) in boxes.items()}
    return _traces[model]
