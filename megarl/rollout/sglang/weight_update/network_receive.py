"""Boxes of weights, from the trainer's ranks straight into the parameters of one TP rank.

prepare   plan what this rank receives                       once
join      connect with the trainer's ranks and other engines' once, and after a sync that failed
receive   check the plan's boxes; if they are right, in every rank of the engine, receive them
"""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megarl.errors import WeightSyncError
from megarl.reshard.planning.disaggregated import HandoverRank
from megarl.reshard.transfer.bucket import BoxSlot
from megarl.reshard.transfer.process_groups import Meeting
from megarl.reshard.transfer.sink import Parameters
from megarl.rollout.sglang.weight_layout.engine_trace import fold, listing
from megarl.rollout.sglang.weight_update.box_writer import (
    Session,
    box_problem,
    find_targets,
    forget_session,
    open_session,
)
from megarl.rollout.sglang.weight_update.commit_vote import Ballot
from megarl.rollout.sglang.weight_update.messages import Order, Reply

_prepared: HandoverRank | None = None
"""This process's part, and its connections."""


def prepare(_: nn.Module, order: Order, reply: Reply) -> None:
    """Plan; connections that there were are dropped."""
    global _prepared
    handover = pickle.loads(Path(order["handover"]).read_bytes())  # noqa: S301 -- this engine's host has written it
    if _prepared is not None:
        _prepared.close()
    _prepared = HandoverRank(handover, handover.engine_rank(order["engine"], reply.rank))


def join(_: nn.Module, order: Order, __: Reply) -> None:
    """Connect with the other ranks, of which all have to join."""
    _demand_prepared().join(Meeting(**order["meeting"]))


def receive(model: Any, order: Order, reply: Reply, ballot: Ballot) -> None:
    """Receive the plan's tensors and boxes; refuse them all if a box is wrong, here or in another rank."""
    session, mine = open_session(order["session"]), _demand_prepared()
    whole = False
    try:
        slots = [slot for each in mine.plan.rounds for slot in each.slots]
        found, tensors = _check(slots, model, session)
        if found:
            reply.error = listing(found)
        if not ballot.agree(ready=not found):
            return
        reply.wrote = True
        reply.result = asdict(mine.run({}, Parameters(tensors), lambda some: model.load_weights(list(some.items()))))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        whole = True
    finally:
        if not whole:
            forget_session()  # it counts boxes that are not written; the update is over
            mine.close()  # the trainer must not wait for this rank


def _check(slots: list[BoxSlot], model: nn.Module, session: Session) -> tuple[list[str], dict[str, Tensor]]:
    """What is wrong with the boxes, and the parameters that they go to; the session counts them as written."""
    found: list[str] = []
    targets, tensors = find_targets(model), dict[str, Tensor]()
    for slot in slots:
        num_dims = len(slot.local_box)
        problem = box_problem(slot, targets, session)
        if problem is None:
            target = targets[slot.local]
            tensor = tensors.setdefault(slot.local, fold(target.tensor, num_dims))
            session.coverage(target, slot.local_box).add(slot.local_box)
            if tensor.dim() != num_dims:
                problem = f"{slot.local} is received with {tensor.dim()} dimensions and with {num_dims}"
        if problem is not None:
            found.append(problem)
    return found, tensors


def _demand_prepared() -> HandoverRank:
    if _prepared is None:
        raise WeightSyncError("this rank does not know yet what to receive: it needs `prepare` first")
    return _prepared
