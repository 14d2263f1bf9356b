"""Receives boxes of weights into the parameters of one TP rank, over the network or from the trainer rank on its slot.

over the network, from the trainer's ranks
prepare         plan what this rank receives, and check that it fits the model                  once
connect         connect with the trainer's ranks and the other engines                          also after a failed sync
receive         if every rank of the engine is ready, receive the boxes                         every update

through shared memory, from the trainer rank on the same slot
prepare_boxes   read which boxes come in which round, check them against the model, connect     once
receive_boxes   if every rank of the engine is ready, copy the boxes of all rounds, or decode   every update
                the changed elements that the trainer rank lists
"""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megarl.engines.sglang.weight_update.finish_update import CommitVote, get_session, make_planned_boxes, reset_session
from megarl.engines.sglang.weight_update.messages import Command, Reply
from megarl.engines.sglang.weight_update.planned_boxes import PlannedBoxes
from megarl.errors import WeightSyncError
from megarl.reshard.layout.boxes import Ints
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.box_channel import BoxOffer, BoxReceiver
from megarl.reshard.transfer.bucket import BoxBucket, Parameters, identify_memory, map_bucket
from megarl.reshard.transfer.process_groups import TransferGroup


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


def _require_shared() -> _SharedPlan:
    if _shared is None:
        raise WeightSyncError("this rank does not know which boxes it receives: it needs `prepare_boxes` first")
    if not _shared.receiver.is_connected:
        sender = _shared.receiver.sender
        raise WeightSyncError(f"the connection with {sender} was closed when a sync failed: it needs `prepare_boxes`")
    return _shared
