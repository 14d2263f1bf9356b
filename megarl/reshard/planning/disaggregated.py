"""Weight sync for disaggregated engines: trainer ranks and engine ranks are the ranks of one plan.

    rank   0 ... W - 1    trainer ranks, which hold weights
           W + tp * i + r TP rank r of engine i, which needs weights

Engine ranks receive their boxes directly. Each missing byte enters a node once and is relayed there, from engine rank
to engine rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import WeightLayout, once_each
from megarl.reshard.layout.model_tensors import digest_of
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import RoundPlan, cached_plan, release_indexes
from megarl.reshard.planning.strategy import DeltaUpdate, Sinks, SyncStats
from megarl.reshard.transfer.bucket import Parameters
from megarl.reshard.transfer.delta_sync import RankSync
from megarl.reshard.transfer.process_groups import TransferGroup, connect_group
from megarl.reshard.transfer.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """Inputs that all ranks plan from, identical on every rank."""

    sources: Sequence[WeightLayout]
    """By trainer rank, the layout it holds."""
    needs: Sequence[WeightLayout]
    """By TP rank, the layout that it receives; all engines have the same."""
    num_engines: int
    nodes: tuple[int, ...]
    """By rank, trainer ranks and then engine ranks, the node it runs on."""
    bucket_bytes: int

    @property
    def size(self) -> int:
        """Number of ranks of both sides together."""
        return len(self.sources) + self.num_engines * len(self.needs)

    @property
    def rank_legend(self) -> str:
        """Text for error messages that explains the numbering of ranks."""
        first, tp = len(self.sources), len(self.needs)
        return f"ranks up to {first - 1} are trainer ranks, those of engine i begin at {first} + {tp} * i"

    def engine_rank(self, engine: int, tp_rank: int) -> int:
        """Return the rank in the plan of TP rank `tp_rank` of engine `engine`."""
        return len(self.sources) + engine * len(self.needs) + tp_rank

    def plan(self, rank: int) -> RoundPlan:
        """Return the rounds of `rank`.

        Raises:
            WeightSyncError: no trainer rank holds an element that an engine needs, or the dtypes differ.
        """
        sources, needs = self.layouts()
        return cached_plan(sources, needs, Topology(self.nodes), rank, self.bucket_bytes)

    def layouts(self) -> tuple[list[WeightLayout], dict[int, WeightLayout]]:
        """Return, by rank, the layout that it holds and, by engine rank, the layout that it receives."""
        assert len(self.nodes) == self.size, (len(self.nodes), self.size)
        layouts = [need for _ in range(self.num_engines) for need in self.needs]
        nothing = WeightLayout(self.sources[0].tensors, ())
        needs = {len(self.sources) + number: layout for number, layout in enumerate(layouts)}
        return [*self.sources, *(nothing for _ in layouts)], needs

    def fingerprint(self) -> str:
        """Return a digest that is equal in all processes with equal inputs, except for names of local tensors."""
        fields = self.num_engines, self.nodes, self.bucket_bytes
        digests = once_each(lambda layout: layout.box_digest, [*self.sources, *self.needs])
        return digest_of([repr(fields).encode(), *digests]).hex()


class TransferRank:
    """One rank of either side: its plan, and its connections to the others, which last until a sync fails."""

    def __init__(self, transfer_spec: TransferSpec, rank: int) -> None:
        """Make the plan of `rank`; raises as `TransferSpec.plan` does."""
        self.rank, self.plan = rank, transfer_spec.plan(rank)
        release_indexes()
        self._fingerprint = transfer_spec.fingerprint()
        self.transport: Transport | None = None
        """The connection with the other ranks; None before `connect`."""
        self._sync = RankSync(rank, self.plan, transfer_spec.bucket_bytes)

    @property
    def is_connected(self) -> bool:
        """Whether the connections are usable: False before `connect` and after a failed sync."""
        return self.transport is not None and not self.transport.is_closed

    def connect(self, transfer_group: TransferGroup) -> None:
        """Drop existing connections and connect to all other ranks; collective over all ranks.

        Raises:
            WeightSyncError: another rank did not connect in time, or its plan has other inputs.
        """
        self.close()
        self.transport = connect_group(transfer_group, self.rank, self._fingerprint)

    def push(self, tensors: Mapping[str, Tensor], _: Sinks, delta: DeltaUpdate | None = None) -> SyncStats:
        """Run the part of a trainer rank, as `Strategy.push`; sinks are unused: engine ranks receive directly."""
        return self.run(tensors, None, delta)

    def run(
        self, tensors: Mapping[str, Tensor], target: Parameters | None, delta: DeltaUpdate | None = None
    ) -> SyncStats:
        """Run one sync; collective over all ranks.

        Args:
            tensors: the tensors of a trainer rank, under the names of its layout; empty on an engine rank.
            target: the parameters of an engine rank; None on a trainer rank.
            delta: leave out elements that have not changed; None: leave out nothing.

        Raises:
            WeightSyncError: another rank is lost or late; the ranks have to `connect` again. Boxes that arrived before
                the failure are already in the parameters.
        """
        if self.transport is None or self.transport.is_closed:
            reason = self.transport.abort_reason if self.transport is not None else ""
            why = f" (the sync was aborted: {reason})" if reason else ""
            raise WeightSyncError(
                f"rank {self.rank} has no connections to the other ranks{why}: call `connect` before a sync"
            )
        with self.transport.syncing():
            return self._sync.run(tensors, target, delta, self.transport)

    def close(self) -> None:
        """Free the buffers and drop the connections; ranks that wait for this rank fail at once."""
        self._sync.close()
        if self.transport is not None:
            self.transport.close()
