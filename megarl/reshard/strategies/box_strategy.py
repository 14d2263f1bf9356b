"""`micro_dp` and `exact`: every rank receives exactly the boxes that its engine rank needs and it does not hold.

They differ in the placement of engine ranks (`megarl.reshard.layout.engine_ranks`) and in the preferred sources:
`micro_dp` all-gathers within micro-DP groups as HybridFlow does; `exact` receives from any rank, which also supports
sizes that do not divide.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megarl.reshard.planning.plan_cache import RoundPlan, cached_plan, release_indexes
from megarl.reshard.planning.strategy import DeltaUpdate, Sinks, SyncContext, SyncStats
from megarl.reshard.transfer.delta_sync import RankSync
from megarl.reshard.transfer.heartbeat import HeartbeatSpec
from megarl.reshard.transfer.process_groups import (
    TransportMaker,
    destroy_group,
    make_group,
    make_sync_transport,
    raise_on_all_ranks,
)
from megarl.reshard.transfer.transport import Deadline


class BoxStrategy:
    """Plans once from the layouts, and executes the plan at every push."""

    def __init__(
        self,
        context: SyncContext,
        bucket_bytes: int,
        timeout_seconds: float,
        make_transport: TransportMaker | None = None,
        heartbeat: HeartbeatSpec | None = None,
    ) -> None:
        """Plan, then create and connect process groups; collective over all ranks.

        Raises WeightSyncError on all ranks if one of them cannot plan. The other arguments: see `make_sync_transport`.

        Args:
            timeout_seconds: timeout of a push; after a failed push, create a new strategy.
        """
        with raise_on_all_ranks():
            plan = plan_boxes(context, bucket_bytes)
        release_indexes()
        self._gather_group = make_group(context.rank, context.groups)
        self._sync = RankSync(context.rank, plan, bucket_bytes, self._gather_group)
        self.rounds = plan.rounds
        """The rounds of this rank, in order."""
        self._sync_group, self._transport = make_sync_transport(timeout_seconds, make_transport, heartbeat)

    def raise_if_aborted(self) -> None:
        """Raise LostRankError if the sync was aborted on all ranks; for sinks that wait."""
        self._transport.raise_if_aborted()

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks, delta: DeltaUpdate | None = None) -> SyncStats:
        """Push boxes, as `Strategy.push`; with a `delta`, leave out elements that have not changed."""
        deadline = Deadline(self._transport.timeout_seconds)
        if sinks.wait_ready is not None:
            sinks.wait_ready()
        with self._transport.syncing():
            return self._sync.run(tensors, sinks.boxes, delta, self._transport, deadline)

    def close(self) -> None:
        """Free the buffers and process groups."""
        self._sync.close()
        self._transport.close()
        destroy_group(self._gather_group)
        destroy_group(self._sync_group)


def plan_boxes(context: SyncContext, bucket_bytes: int) -> RoundPlan:
    """Return the rounds of `context.rank`."""
    return cached_plan(
        context.sources, context.needs, context.topology, context.rank, bucket_bytes, groups=context.groups
    )
