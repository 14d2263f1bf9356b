"""Trainer ranks and engine ranks as the ranks of one plan: engines receive their boxes themselves.

    rank   0 ... W - 1    trainer ranks, which hold
           W + tp * i + r TP rank r of engine i, which needs

Each missing byte enters a machine once and is handed on there, from engine rank to engine rank.

Tensors of which engines compute values of their own go first, whole: every engine rank receives some of them into
memory that it borrows, and has its model load them, before the next. All others go as boxes to where they stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Piece, TensorSpec, WeightLayout, without
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import Planned, cached_plan
from megarl.reshard.planning.strategy import Outlets, SyncStats
from megarl.reshard.transfer.bucket import split_into_buckets, torch_dtype
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.process_groups import Meeting, join_group
from megarl.reshard.transfer.sink import Parameters
from megarl.reshard.transfer.transport import Wire


@dataclass(frozen=True, slots=True)
class WholePlan:
    """One rank's rounds for some tensors that engines take whole."""

    tensors: Mapping[str, TensorSpec]
    rounds: Planned


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
    whole: tuple[str, ...] = ()
    """Tensors that engines load by themselves; see `RolloutEngine.whole_tensors`."""

    @property
    def size(self) -> int:
        """Ranks of both sides."""
        return len(self.sources) + self.num_engines * len(self.needs)

    @property
    def legend(self) -> str:
        """Which rank is whose, for people."""
        first, tp = len(self.sources), len(self.needs)
        return f"ranks up to {first - 1} are trainer ranks, those of engine i begin at {first} + {tp} * i"

    def engine_rank(self, engine: int, tp_rank: int) -> int:
        """The rank of an engine's TP rank."""
        return len(self.sources) + engine * len(self.needs) + tp_rank

    def plan(self, rank: int) -> Planned:
        """Rank `rank`'s rounds for the boxes of all tensors that do not go whole.

        Raises:
            WeightSyncError: no trainer rank holds an element that an engine needs, or it holds another dtype.
        """
        self._check_dtypes()
        return self._plan(rank, [without(need, self.whole) for need in self.needs], self.bucket_bytes)

    def plan_whole(self, rank: int) -> list[WholePlan]:
        """Rank `rank`'s rounds for the tensors that go whole, in the order of travel.

        What an engine borrows for the tensors of one, and their rounds, take two buckets together, but for single
        tensors that are larger than one. Raises as `plan` does.
        """
        self._check_dtypes()
        specs = {name: self.needs[0].tensors[name] for name in self.whole}
        plans = []
        for names in split_into_buckets(specs, self.bucket_bytes):
            pieces = tuple(Piece(name, specs[name].box, name, specs[name].box) for name in names)
            need = WeightLayout(self.needs[0].tensors, pieces)
            rounds = self._plan(rank, [need] * len(self.needs), max(self.bucket_bytes // 2, 1))
            plans.append(WholePlan({name: specs[name] for name in names}, rounds))
        return plans

    def _plan(self, rank: int, of_engine: Sequence[WeightLayout], bucket_bytes: int) -> Planned:
        """Args:
        of_engine: by TP rank, what it receives.
        """
        assert len(self.nodes) == self.size, (len(self.nodes), self.size)
        layouts = [need for _ in range(self.num_engines) for need in of_engine]
        nothing = WeightLayout(self.sources[0].tensors, ())
        needs = {len(self.sources) + number: layout for number, layout in enumerate(layouts)}
        sources = [*self.sources, *(nothing for _ in layouts)]
        return cached_plan(sources, needs, Topology(self.nodes), rank, bucket_bytes)

    def _check_dtypes(self) -> None:
        held = self.sources[0].tensors
        for name, spec in self.needs[0].tensors.items():
            if name in held and held[name].dtype != spec.dtype:
                raise WeightSyncError(f"{name}: the engines hold {spec.dtype}, the trainer {held[name].dtype}")

    def fingerprint(self) -> str:
        """The same in every process that plans the same."""
        what = self.num_engines, self.nodes, self.bucket_bytes, self.whole
        digest = hashlib.blake2b(repr(what).encode(), digest_size=16)
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
        """Plan; raises as `Handover.plan` does."""
        self.rank, self.plan, self.whole = rank, handover.plan(rank), handover.plan_whole(rank)
        self._fingerprint = handover.fingerprint()
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

    def push(self, tensors: Mapping[str, Tensor], _: Outlets) -> SyncStats:
        """A trainer rank's part; see `Strategy` and `run`."""
        return self.run(tensors, None)

    def run(
        self,
        tensors: Mapping[str, Tensor],
        target: Parameters | None,
        load: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> SyncStats:
        """One sync; together with all others.

        Args:
            tensors: what a trainer rank holds, under the names of its layout; empty on an engine's.
            target: the parameters of an engine's rank; None on a trainer's.
            load: what an engine's rank does with tensors that come whole, which it must not keep.

        Raises:
            WeightSyncError: another rank is gone or late, and the ranks have to `join` again. What has arrived is
                in the parameters.
        """
        if not self.joined:
            raise WeightSyncError(f"rank {self.rank} has no connections to the other ranks: a sync needs `join` first")
        counted = [self._run_whole(part, tensors, target, load) for part in self.whole]
        return sum(counted, self._execute(self.plan, tensors, target))

    def _run_whole(
        self,
        part: WholePlan,
        tensors: Mapping[str, Tensor],
        target: Parameters | None,
        load: Callable[[Mapping[str, Tensor]], None] | None,
    ) -> SyncStats:
        if target is None:
            return self._execute(part.rounds, tensors, None)
        assert load is not None, f"rank {self.rank} cannot load {list(part.tensors)}"
        device = next(iter(target.tensors.values())).device
        borrowed = {
            name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            for name, spec in part.tensors.items()
        }
        stats = self._execute(part.rounds, tensors, Parameters(borrowed))
        load(borrowed)
        num_bytes = sum(tensor.nbytes for tensor in borrowed.values())
        return replace(stats, peak_extra_bytes=stats.peak_extra_bytes + num_bytes)

    def _execute(self, planned: Planned, tensors: Mapping[str, Tensor], target: Parameters | None) -> SyncStats:
        executor = BoxExecutor(self.rank, planned.rounds, planned.memory, wire=self._wire)
        executor.run(tensors, target)
        return executor.ledger.stats()

    def close(self) -> None:
        """Drop the connections; others who wait for this rank stop."""
        if self._wire is not None:
            self._wire.close()
