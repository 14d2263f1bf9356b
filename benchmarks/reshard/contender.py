"""Contenders of the benchmark: one method of moving weights on one rank, with the weights it moves."""

from __future__ import annotations

from typing import Literal, Protocol

import torch.distributed as dist

from benchmarks.reshard.content import Shard
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.scenario import Arrangement, Scenario, arrange, build_strategy
from megarl.reshard.analysis.sync_report import time_planning
from megarl.reshard.planning.strategy import Sinks, SyncStats
from megarl.reshard.transfer.sink import Parameters

DeliveryMode = Literal["direct", "shared-memory"]
"""Location of the engine's parameters: in the rank's own process, or in another process behind shared memory."""


class Contender(Protocol):
    """A method of moving weights; its constructor and methods are collective over all ranks."""

    arrangement: Arrangement
    plan_seconds: tuple[float, float]
    """Planning times in seconds, without and with the cache."""

    def fill(self, sync: int) -> None:
        """Fill the source with the weights of sync `sync`, and the destination with NaN."""
        ...

    def push(self) -> SyncStats:
        """Move the weights; return the counted statistics."""
        ...

    def mismatched_bytes(self, sync: int) -> int:
        """Return the number of wrong bytes at this rank's destination."""
        ...

    def received_from(self) -> dict[int, int]:
        """Return, by source rank, the bytes received from it in one push."""
        ...

    def close(self) -> None:
        """Free memory and process groups."""
        ...


class MegarlContender:
    """A strategy of `megarl.reshard`, whose counted statistics must equal its plan's."""

    def __init__(self, name: str, scenario: Scenario, delivery: DeliveryMode) -> None:
        """Plan and create the strategy; raises ConfigError if it does not support these sizes."""
        self._delivery = delivery
        self._rank = rank = dist.get_rank()
        self.arrangement = arrange(name, scenario)
        self.plan_seconds = time_planning(self.arrangement, scenario, rank)
        self._plan = forecast(self.arrangement, scenario)
        self._strategy = build_strategy(self.arrangement, scenario, rank)
        self._held = Shard(scenario.sources[rank])
        need = self.arrangement.needs.get(rank)
        self._served = Shard(need) if need is not None else None

    def fill(self, sync: int) -> None:
        """Fill the source with the weights of sync `sync`, and the destination with NaN."""
        self._held.fill(sync)
        if self._served is not None:
            self._served.fill_nan()

    def push(self) -> SyncStats:
        """Move the weights; return the counted statistics.

        Raises:
            AssertionError: the counted statistics differ from the plan's.
        """
        counted = self._strategy.push(self._held.tensors, self._outlets())
        planned = self._plan.stats[self._rank]
        assert counted == planned, (
            f"{self.arrangement.strategy}, rank {self._rank}: counted {counted}, planned {planned}"
        )
        return counted

    def _outlets(self) -> Sinks:
        if self._served is None:
            return Sinks()
        if self._rank in self.arrangement.senders:
            return Sinks(full_tensors=(self._served,))
        return Sinks(boxes=Parameters(self._served.tensors) if self._delivery == "direct" else self._served)

    def mismatched_bytes(self, sync: int) -> int:
        """Return the number of wrong bytes at this rank's destination."""
        return self._served.mismatched_bytes(sync) if self._served is not None else 0

    def received_from(self) -> dict[int, int]:
        """Return, by source rank, the bytes planned to be received from it in one push."""
        between = self._plan.bytes_between.items()
        return {source: num_bytes for (source, rank), num_bytes in between if rank == self._rank}

    def close(self) -> None:
        """Free the strategy's memory and process groups."""
        self._strategy.close()
