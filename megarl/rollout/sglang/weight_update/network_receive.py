"""Receives boxes of weights from the trainer's ranks directly into the parameters of one TP rank.

prepare   plan what this rank receives                              once
connect   connect with the trainer's ranks and the other engines    once, and after a failed sync
receive   check the plan's boxes; if they are valid on every rank of the engine, receive them
"""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megarl.errors import WeightSyncError
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.transfer.bucket import BoxSlot
from megarl.reshard.transfer.process_groups import TransferGroup
from megarl.reshard.transfer.sink import Parameters
from megarl.rollout.sglang.weight_layout.engine_trace import fold, join_names
from megarl.rollout.sglang.weight_update.box_writer import (
    WriteSession,
    find_box_problem,
    find_targets,
    get_session,
    reset_session,
)
from megarl.rollout.sglang.weight_update.commit_vote import CommitVote
from megarl.rollout.sglang.weight_update.messages import Command, Reply

_prepared: TransferRank | None = None
"""This process's plan and connections."""


def prepare(_: nn.Module, command: Command, reply: Reply) -> None:
    """Plan what to receive; existing connections are closed."""
    global _prepared
    transfer_spec = pickle.loads(Path(command["transfer_spec"]).read_bytes())  # noqa: S301 -- written by this host
    if _prepared is not None:
        _prepared.close()
    _prepared = TransferRank(transfer_spec, transfer_spec.engine_rank(command["engine"], reply.rank))


def connect(_: nn.Module, command: Command, __: Reply) -> None:
    """Connect with the other ranks, which all have to connect at the same time."""
    _require_prepared().connect(TransferGroup(**command["transfer_group"]))


def receive(model: Any, command: Command, reply: Reply, vote: CommitVote) -> None:
    """Receive the planned tensors and boxes; reject them all if a box is invalid on any rank of the engine."""
    session, receiver = get_session(command["session"]), _require_prepared()
    is_complete = False
    try:
        slots = [slot for each in receiver.plan.rounds for slot in each.slots]
        found, tensors = _check(slots, model, session)
        if found:
            reply.error = join_names(found)
        if not vote.all_ready(ready=not found):
            return
        reply.wrote = True
        reply.result = asdict(
            receiver.run({}, Parameters(tensors), lambda some: model.load_weights(list(some.items())))
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        is_complete = True
    finally:
        if not is_complete:
            reset_session()  # it contains boxes that were not written; the update has failed
            receiver.close()  # so that the trainer does not wait for this rank


def _check(slots: list[BoxSlot], model: nn.Module, session: WriteSession) -> tuple[list[str], dict[str, Tensor]]:
    """Return problems of the boxes, and their parameters by name; records the valid boxes as written in the session."""
    found: list[str] = []
    targets, tensors = find_targets(model), dict[str, Tensor]()
    for slot in slots:
        num_dims = len(slot.local_box)
        problem = find_box_problem(slot, targets, session)
        if problem is None:
            target = targets[slot.local]
            tensor = tensors.setdefault(slot.local, fold(target.tensor, num_dims))
            session.coverage(target, slot.local_box).add(slot.local_box)
            if tensor.dim() != num_dims:
                problem = f"{slot.local} is received both with {tensor.dim()} and with {num_dims} dimensions"
        if problem is not None:
            found.append(problem)
    return found, tensors


def _require_prepared() -> TransferRank:
    if _prepared is None:
        raise WeightSyncError("this rank has no plan of what to receive: it needs `prepare` first")
    return _prepared
