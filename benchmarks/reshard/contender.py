"""What is compared: one way of moving weights, with the weights that it moves, on one rank."""

from __future__ import annotations

from typing import Literal, Protocol

import torch.distributed as dist

from benchmarks.reshard.content import Shard
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.scenario import Arrangement, Scenario, arrange, build_strategy
from megarl.reshard.analysis.sync_report import time_planning
from megarl.reshard.planning.strategy import Outlets, SyncStats
from megarl.reshard.transfer.sink import Parameters

HandOver = Literal["direct", "shared-memory"]
"""Where the engine's parameters are: in the rank's own process, or in another one, behind shared memory."""


class Contender(Protocol):
    """Made, and called, on all ranks together."""

    arrangement: Arrangement
    plan_seconds: tuple[float, float]
    """Cold and cached."""

    def fill(self, sync: int) -> None:
        """Give the source the weights of sync `sync`, and spoil the destination."""
        ...

    def push(self) -> SyncStats:
        """Move them, and count."""
        ...

    def mismatched_bytes(self, sync: int) -> int:
        """At this rank's destination."""
        ...

    def received_from(self) -> dict[int, int]:
        """By other rank, bytes that came from it in one push."""
        ...

    def close(self) -> None:
        """Free what it allocated."""
        ...


class Planned:
    """A strategy of `megarl.reshard`, whose books must equal its plan."""

    def __init__(self, name: str, scenario: Scenario, hand_over: HandOver) -> None:
        """Raises ConfigError where the strategy cannot serve these sizes."""
        self._hand_over = hand_over
        self._rank = rank = dist.get_rank()
        self.arrangement = arrange(name, scenario)
        self.plan_seconds = time_planning(self.arrangement, scenario, rank)
        self._plan = forecast(self.arrangement, scenario)
        self._strategy = build_strategy(self.arrangement, scenario, rank)
        self._held = Shard(scenario.sources[rank])
        need = self.arrangement.needs.get(rank)
        self._served = Shard(need) if need is not None else None

    def fill(self, sync: int) -> None:
        """See `Contender`."""
        self._held.fill(sync)
        if self._served is not None:
            self._served.poison()

    def push(self) -> SyncStats:
        """See `Contender`.

        Raises:
            AssertionError: the books differ from the plan.
        """
        counted = self._strategy.push(self._held.tensors, self._outlets())
        planned = self._plan.stats[self._rank]
        assert counted == planned, (
            f"{self.arrangement.strategy}, rank {self._rank}: counted {counted}, planned {planned}"
        )
        return counted

    def _outlets(self) -> Outlets:
        if self._served is None:
            return Outlets()
        if self._rank in self.arrangement.senders:
            return Outlets(whole=(self._served,))
        return Outlets(boxes=Parameters(self._served.tensors) if self._hand_over == "direct" else self._served)

    def mismatched_bytes(self, sync: int) -> int:
        """See `Contender`."""
        return self._served.mismatched_bytes(sync) if self._served is not None else 0

    def received_from(self) -> dict[int, int]:
        """See `Contender`; as planned."""
        between = self._plan.bytes_between.items()
        return {source: num_bytes for (source, rank), num_bytes in between if rank == self._rank}

    def close(self) -> None:
        """See `Contender`."""
        self._strategy.close()
