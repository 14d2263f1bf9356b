"""Receives boxes of weights from the trainer rank on the same slot into the parameters of one TP rank.

prepare_boxes   read which boxes come in which round, check them against the model, connect     once
receive_boxes   if every rank of the engine is ready, copy the boxes of all rounds, or decode   every update
                the changed elements that the trainer rank lists
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megarl.engines.sglang.weight_update.finish_update import CommitVote, get_session, plan_boxes, reset_session
from megarl.engines.sglang.weight_update.messages import Command, Reply
from megarl.engines.sglang.weight_update.planned_boxes import PlannedBoxes
from megarl.errors import WeightSyncError
from megarl.reshard.layout.boxes import Ints
from megarl.reshard.transfer.box_channel import BoxOffer, BoxReceiver
from megarl.reshard.transfer.bucket import BoxBucket, identify_memory, map_bucket


@dataclass(frozen=True, slots=True)
class _Prepared:
    """This process's plan and connection."""

    boxes: PlannedBoxes
    rounds: tuple[int, ...]
    """Indices of the rounds that have boxes."""
    receiver: BoxReceiver


_prepared: _Prepared | None = None


def prepare_boxes(model: nn.Module, command: Command, _: Reply) -> None:
    """Check the boxes that the command's trainer rank offers, and connect with it; an older connection is closed."""
    global _prepared
    if _prepared is not None:
        _prepared.receiver.close()
        _prepared = None
    offer = BoxOffer(**command["offer"])
    rounds = offer.read_slots()
    boxes = plan_boxes(model, rounds, command)
    _prepared = _Prepared(boxes, tuple(i for i, slots in enumerate(rounds) if slots), BoxReceiver(offer))


def receive_boxes(model: nn.Module, command: Command, reply: Reply, vote: CommitVote) -> None:
    """Copy the boxes of all rounds as they come; copy nothing if any rank of the engine cannot."""
    session, prepared, is_complete = get_session(command["session"]), _require_prepared(), False
    abort_file, mapped = Path(command["abort_file"]), dict[tuple[int | str, ...], Tensor]()

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
                prepared.boxes.copy_round(index, _map(bucket, mapped))
            else:
                prepared.boxes.decode_round(index, _map(bucket, mapped), codes[index])
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the sender reuses the bucket once it has the answer
            if index == rounds[-1]:
                mapped.clear()  # the sender frees its buckets now
            prepared.receiver.acknowledge()
        is_complete = True
    except (WeightSyncError, OSError) as e:
        prepared.receiver.fail(str(e))
        raise
    finally:
        if not is_complete:
            reset_session()
            prepared.receiver.close()  # so that the trainer does not wait for this rank


def _map(bucket: BoxBucket, mapped: dict[tuple[int | str, ...], Tensor]) -> Tensor:
    """Return the bucket's bytes, mapped once: mapping a bucket costs as much as copying much of it."""
    key, size = identify_memory(bucket)
    if size < bucket.num_bytes:  # reading past the end of a mapping is a SIGBUS
        raise WeightSyncError(f"{bucket.path} needs {bucket.num_bytes} bytes, got {size}")
    if key not in mapped:
        mapped[key] = map_bucket(bucket)
    return mapped[key]


def _require_prepared() -> _Prepared:
    if _prepared is None:
        raise WeightSyncError("this rank does not know which boxes it receives: it needs `prepare_boxes` first")
    if not _prepared.receiver.is_connected:
        sender = _prepared.receiver.sender
        raise WeightSyncError(f"the connection with {sender} was closed when a sync failed: it needs `prepare_boxes`")
    return _prepared
