"""Trainer ranks and engine ranks as the ranks of one plan: engines receive their boxes themselves.

    rank   0 ... W - 1    trainer ranks, which hold
           W + tp * i + r TP rank r of engine i, which needs

Each missing byte enters a machine once and is handed on there, from engine rank to engine rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.cache import Planned, cached_plan
from megarl.reshard.executor import BoxExecutor
from megarl.reshard.layout import WeightLayout
from megarl.reshard.process_groups import Meeting, join_group
from megarl.reshard.sink import Parameters
from megarl.reshard.strategy import SyncStats
from megarl.reshard.topology import Topology
from megarl.reshard.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What all ranks plan from; the same on every one."""

    sources: Sequence[WeightLayout]
    """By trainer rank."""
    needs: Sequence[WeightLayout]
    """By TP rank; engines are alike."""
    num_engines: int
    nodes: tuple[int, ...]
    """By rank, trainer and engine ranks, which machine it is on."""
    bucket_bytes: int

    @property
    def size(self) -> int:
        """Ranks of both sides."""
        return len(self.sources) + self.num_engines * len(self.needs)

    def engine_rank(self, engine: int, tp_rank: int) -> int:
        """The rank of an engine's TP rank."""
        return len(self.sources) + engine * len(self.needs) + tp_rank

    def plan(self, rank: int) -> Planned:
        """Rank `rank`'s rounds.

        Raises:
            WeightSyncError: no trainer rank holds an element that an engine needs, or it holds another dtype.
        """
        self._check_dtypes()
        assert len(self.nodes) == self.size, (len(self.nodes), self.size)
        layouts = [need for _ in range(self.num_engines) for need in self.needs]
        nothing = WeightLayout(self.sources[0].tensors, ())
        needs = {len(self.sources) + number: layout for number, layout in enumerate(layouts)}
        sources = [*self.sources, *(nothing for _ in layouts)]
        return cached_plan(sources, needs, Topology(self.nodes), rank, self.bucket_bytes)

    def _check_dtypes(self) -> None:
        held = self.sources[0].tensors
        for name, spec in self.needs[0].tensors.items():
            if name in held and held[name].dtype != spec.dtype:
                raise WeightSyncError(f"{name}: the engines hold {spec.dtype}, the trainer {held[name].dtype}")

    def fingerprint(self) -> str:
        """The same in every process that plans the same."""
        digest = hashlib.blake2b(repr((self.num_engines, self.nodes, self.bucket_bytes)).encode(), digest_size=16)
        numbers: dict[WeightLayout, int] = {}
        for layout in (*self.sources, *self.needs):
            is_new = layout not in numbers
            digest.update(f"layout {numbers.setdefault(layout, len(numbers))}".encode())
            if is_new:
                digest.update(repr((list(layout.tensors.items()), layout.table.tensors, layout.table.locals)).encode())
                for array in (layout.table.tensor, layout.table.local, layout.table.boxes, layout.table.local_boxes):
                    digest.update(array.tobytes())
        return digest.hexdigest()


class HandoverRank:
    """One rank, of either side: its plan, and the connections to the others until a sync fails."""

    def __init__(self, handover: Handover, rank: int) -> None:
        self.rank, self.plan, self._fingerprint = rank, handover.plan(rank), handover.fingerprint()
        self._wire: Wire | None = None

    @property
    def joined(self) -> bool:
        """False before `join`, and after a sync that failed."""
        return self._wire is not None and not self._wire.closed

    def join(self, meeting: Meeting) -> None:
        """Connect with all others, who do the same; connections that there were are dropped.

        Raises:
            WeightSyncError: another rank did not join in time, or it has planned from something else.
        """
        self.close()
        self._wire = join_group(meeting, self.rank, self._fingerprint)

    def run(self, tensors: Mapping[str, Tensor], target: Parameters | None) -> SyncStats:
        """One sync; together with all others.

        Args:
            tensors: what a trainer rank holds, under the names of its layout; empty on an engine's.
            target: the parameters of an engine's rank; None on a trainer's.

        Raises:
            WeightSyncError: another rank is gone or late, and the ranks have to `join` again. What has arrived is
                in the parameters.
        """
        if not self.joined:
            raise WeightSyncError(f"rank {self.rank} has no connections to the other ranks: a sync needs `join` first")
        executor = BoxExecutor(self.rank, self.plan.rounds, self.plan.memory, wire=self._wire)
        executor.run(tensors, target)
        return executor.ledger.stats()

    def close(self) -> None:
        """Drop the connections; others who wait for this rank stop."""
        if self._wire is not None:
            self._wire.close()
