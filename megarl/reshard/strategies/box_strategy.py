"""`micro_dp` and `exact`: every rank receives exactly the boxes that its engine rank needs and it does not hold.

They differ in the placement of engine ranks (`megarl.reshard.layout.engine_ranks`) and in the preferred sources:
`micro_dp` all-gathers within micro-DP groups as HybridFlow does; `exact` receives from any rank, which also supports
sizes that do not divide.

Tensors from which engines derive values of their own are sent first and in full, by `gather_hf`:

    all ranks                   full tensors, to every engine from the first rank that serves it
    then all ranks              boxes of all other tensors, to every engine rank from the rank that serves it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from megarl.reshard.layout.layout import without
from megarl.reshard.planning.plan_cache import RoundPlan, cached_plan
from megarl.reshard.planning.strategy import Sinks, SyncContext, SyncStats
from megarl.reshard.strategies.gather_hf import GatherHf
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.process_groups import destroy_group, make_group, make_sync_group
from megarl.reshard.transfer.transport import Transport


class BoxStrategy:
    """Plans once from the layouts, and executes the plan at every push."""

    def __init__(self, context: SyncContext, bucket_bytes: int, timeout_seconds: float | None = None) -> None:
        """Plan and create process groups; collective over all ranks.

        Args:
            timeout_seconds: timeout for the boxes of a push, which use a separate process group; after a failed push,
                create a new strategy. None: use torch's default group and its timeout.
        """
        self._rank = context.rank
        self._full_gather = GatherHf(context, bucket_bytes, only=context.full_tensors) if context.full_tensors else None
        self._plan = plan_boxes(context, bucket_bytes)
        self._gather_group = make_group(context.rank, context.groups)
        self._sync_group = None if timeout_seconds is None else make_sync_group(timeout_seconds)
        self._timeout_seconds = timeout_seconds

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks) -> SyncStats:
        """Push full tensors, then boxes, as `Strategy.push`."""
        full_stats = self._full_gather.push(tensors, sinks) if self._full_gather else None
        transport = Transport(
            self._sync_group, timeout_seconds=self._timeout_seconds, is_exclusive=self._sync_group is not None
        )
        executor = BoxExecutor(self._rank, self._plan.rounds, self._plan.buffer_sizes, self._gather_group, transport)
        executor.run(tensors, sinks.boxes)
        box_stats = executor.counter.stats()
        if self._full_gather is None or full_stats is None:
            return box_stats
        held = box_stats.peak_extra_bytes + self._full_gather.held_bytes
        return replace(full_stats + box_stats, peak_extra_bytes=max(full_stats.peak_extra_bytes, held))

    def close(self) -> None:
        """Free the process groups and the buffers of full tensors; the buffers of boxes exist only during a push."""
        if self._full_gather:
            self._full_gather.close()
        destroy_group(self._gather_group)
        destroy_group(self._sync_group)


def plan_boxes(context: SyncContext, bucket_bytes: int) -> RoundPlan:
    """Return the rounds of `context.rank` for the tensors that are sent as boxes."""
    distinct = {id(need): need for need in context.needs.values()}
    needs = {key: without(need, context.full_tensors) for key, need in distinct.items()}
    return cached_plan(
        context.sources,
        {rank: needs[id(need)] for rank, need in context.needs.items()},
        context.topology,
        context.rank,
        bucket_bytes,
        groups=context.groups,
    )
