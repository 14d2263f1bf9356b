"""`micro_dp` and `exact`: every rank receives exactly the boxes that its engine rank needs and it does not hold.

They differ in the placement of engine ranks (`megarl.reshard.layout.engine_ranks`) and in the preferred sources:
`micro_dp` all-gathers within micro-DP groups as HybridFlow does; `exact` receives from any rank, which also supports
sizes that do not divide.

Tensors from which engines derive values of their own are sent first and in full, by `gather_hf`:

    all ranks                   full tensors, to every engine from the first rank that serves it
    then all ranks              boxes of all other tensors, to every engine rank from the rank that serves it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megarl.reshard.layout.layout import without
from megarl.reshard.planning.plan_cache import RoundPlan, cached_plan, release_indexes
from megarl.reshard.planning.rounds import Round
from megarl.reshard.planning.strategy import DeltaUpdate, Sinks, SyncContext, SyncStats
from megarl.reshard.strategies.gather_hf import GatherHf
from megarl.reshard.transfer.bucket import Parameters, ShardSink
from megarl.reshard.transfer.delta_sync import DeltaSync
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.heartbeat import HeartbeatSpec
from megarl.reshard.transfer.process_groups import (
    TransportMaker,
    destroy_group,
    make_group,
    make_sync_group,
    make_sync_transport,
    raise_on_all_ranks,
)
from megarl.reshard.transfer.transport import Deadline, Transport


class BoxStrategy:
    """Plans once from the layouts, and executes the plan at every push."""

    def __init__(
        self,
        context: SyncContext,
        bucket_bytes: int,
        timeout_seconds: float | None = None,
        backend: str | TransportMaker | None = None,
        heartbeat: HeartbeatSpec | None = None,
    ) -> None:
        """Plan, then create and connect process groups; collective over all ranks.

        Args:
            timeout_seconds: timeout of a push, whose boxes then use a process group of their own; after a failed push,
                create a new strategy. None: use torch's default group and its timeout.
            backend: as for `make_sync_transport`, if the boxes use a separate process group.
            heartbeat: as for `make_sync_transport`, likewise.

        Raises:
            WeightSyncError: a rank cannot plan, on all ranks; or a rank did not connect in time.
        """
        self._rank, self._bucket_bytes = context.rank, bucket_bytes
        with raise_on_all_ranks():
            self._plan = plan_boxes(context, bucket_bytes)
        release_indexes()
        self._full_gather = (
            GatherHf(context, bucket_bytes, context.full_tensors, timeout_seconds) if context.full_tensors else None
        )
        self._gather_group = make_group(context.rank, context.groups)
        self._sync_group, self._transport = None, Transport()
        self._delta: DeltaSync | None = None
        """Made for the first push that may leave boxes out."""
        if timeout_seconds is not None:
            self._sync_group = make_sync_group(timeout_seconds)
            self._transport = make_sync_transport(self._sync_group, timeout_seconds, backend, heartbeat)

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds of this rank, in order."""
        return self._plan.rounds

    def raise_if_aborted(self) -> None:
        """Raise LostRankError if the sync was aborted on all ranks; for sinks that wait."""
        self._transport.raise_if_aborted()

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks, delta: DeltaUpdate | None = None) -> SyncStats:
        """Push full tensors, then boxes, as `Strategy.push`.

        Args:
            delta: leave out boxes that have not changed, but no full tensors; None: leave out nothing.
        """
        deadline = Deadline(self._transport.timeout_seconds)
        full_stats = self._full_gather.push(tensors, sinks, deadline) if self._full_gather else None
        if sinks.wait_ready is not None:
            sinks.wait_ready()
        with self._transport.syncing():
            box_stats = self._push_boxes(tensors, sinks.boxes, delta, deadline)
        return box_stats if full_stats is None else full_stats + box_stats

    def _push_boxes(
        self,
        tensors: Mapping[str, Tensor],
        sink: ShardSink | Parameters | None,
        delta: DeltaUpdate | None,
        deadline: Deadline,
    ) -> SyncStats:
        if delta is not None:
            self._delta = self._delta or DeltaSync(self._rank, self.rounds, self._bucket_bytes, self._gather_group)
            return self._delta.run(tensors, sink, delta, self._transport, deadline)
        executor = BoxExecutor(
            self._rank, self._plan.rounds, self._plan.buffer_sizes, self._gather_group, self._transport
        )
        executor.run(tensors, sink, deadline)
        return executor.counter.stats()

    def close(self) -> None:
        """Free the process groups; buffers exist only during a push."""
        if self._full_gather:
            self._full_gather.close()
        self._transport.close()
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
