"""Receives boxes of weights from the trainer's ranks directly into the parameters of one TP rank.

prepare   plan what this rank receives, and check that it fits the model         once
connect   connect with the trainer's ranks and the other engines                 once, and after a failed sync
receive   if every rank of the engine is ready, receive the boxes                every update
"""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from megarl.engines.sglang.weight_update.finish_update import CommitVote, get_session, plan_boxes, reset_session
from megarl.engines.sglang.weight_update.messages import Command, Reply
from megarl.engines.sglang.weight_update.planned_boxes import PlannedBoxes
from megarl.errors import WeightSyncError
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.process_groups import TransferGroup
from megarl.reshard.transfer.sink import Parameters


@dataclass(frozen=True, slots=True)
class _Prepared:
    """This process's plan and connections."""

    receiver: TransferRank
    boxes: PlannedBoxes


_prepared: _Prepared | None = None


def prepare(model: nn.Module, command: Command, reply: Reply) -> None:
    """Plan what to receive, and check it against the model; existing connections are closed."""
    global _prepared
    transfer_spec = pickle.loads(Path(command["transfer_spec"][reply.rank]).read_bytes())  # noqa: S301 -- written by this host
    if _prepared is not None:
        _prepared.receiver.close()
        _prepared = None
    receiver = TransferRank(transfer_spec, transfer_spec.engine_rank(command["engine"], reply.rank))
    boxes = plan_boxes(model, [each.slots for each in receiver.plan.rounds], command)
    _prepared = _Prepared(receiver, boxes)


def connect(_: nn.Module, command: Command, __: Reply) -> None:
    """Connect with the other ranks, which all have to connect at the same time."""
    _require_prepared().receiver.connect(TransferGroup(**command["transfer_group"]))


def receive(model: nn.Module, command: Command, reply: Reply, vote: CommitVote) -> None:
    """Receive the planned boxes; write nothing if any rank of the engine cannot."""
    session, prepared = get_session(command["session"]), _require_prepared()
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


def _require_prepared() -> _Prepared:
    if _prepared is None:
        raise WeightSyncError("this rank has no plan of what to receive: it needs `prepare` first")
    return _prepared
