"""`micro_dp` and `exact`: every rank receives the boxes that its engine rank needs and it does not hold, and no others.

They differ in who serves whom (`megarl.reshard.layout.engine_ranks`) and in whom a rank prefers to ask: `micro_dp` its
micro-DP group, HybridFlow's all-gather; `exact` anyone, which also serves sizes that do not divide.

Tensors of which engines compute values of their own go first, whole, by way of `gather_hf`:

    all ranks                   whole tensors, to every engine from the first of its servers
    then all ranks              boxes of all other tensors, to every engine rank from its server
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from megarl.reshard.layout.layout import without
from megarl.reshard.planning.plan_cache import Planned, cached_plan
from megarl.reshard.planning.strategy import Outlets, SyncContext, SyncStats
from megarl.reshard.strategies.gather_hf import GatherHf
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.process_groups import free_group, make_group, own_group
from megarl.reshard.transfer.transport import Wire


class BoxStrategy:
    """Plans once, from layouts alone, and runs the plan at every push."""

    def __init__(self, context: SyncContext, bucket_bytes: int, timeout_seconds: float | None = None) -> None:
        """Plan; collective over all ranks.

        Args:
            timeout_seconds: how long the boxes of a push may take, over connections of their own; after a push that
                failed, make another strategy. None: over torch's default group, as long as that waits.
        """
        self._rank = context.rank
        self._whole = GatherHf(context, bucket_bytes, only=context.whole) if context.whole else None
        self._plan = plan_boxes(context, bucket_bytes)
        self._group = make_group(context.rank, context.groups)
        self._all = None if timeout_seconds is None else own_group(timeout_seconds)
        self._timeout_seconds = timeout_seconds

    def push(self, tensors: Mapping[str, Tensor], outlets: Outlets) -> SyncStats:
        """See `Strategy.push`."""
        whole = self._whole.push(tensors, outlets) if self._whole else None
        wire = Wire(self._all, timeout_seconds=self._timeout_seconds, own=self._all is not None)
        executor = BoxExecutor(self._rank, self._plan.rounds, self._plan.memory, self._group, wire)
        executor.run(tensors, outlets.boxes)
        boxes = executor.ledger.stats()
        if self._whole is None or whole is None:
            return boxes
        held = boxes.peak_extra_bytes + self._whole.held_bytes
        return replace(whole + boxes, peak_extra_bytes=max(whole.peak_extra_bytes, held))

    def close(self) -> None:
        """Free the process groups, and the buffers of whole tensors; those of boxes live for one push only."""
        if self._whole:
            self._whole.close()
        free_group(self._group)
        free_group(self._all)


def plan_boxes(context: SyncContext, bucket_bytes: int) -> Planned:
    """The rounds of `context.rank`."""
    distinct = {id(need): need for need in context.needs.values()}
    needs = {key: without(need, context.whole) for key, need in distinct.items()}
    return cached_plan(
        context.sources,
        {rank: needs[id(need)] for rank, need in context.needs.items()},
        context.topology,
        context.rank,
        bucket_bytes,
        groups=context.groups,
    )
