"""Contenders of the benchmark: one method of moving weights on one rank, with the weights it moves.

    ds_chat, hybridflow_v    the full model to every rank, as HybridFlow's baselines (`full_gather`)
    gather_hf                full tensors, gathered a bucket at a time, as slime does
    gather_hf_serial         the same, one tensor at a time
    exact                    boxes, on micro-DP placement if the sizes divide
    exact_consecutive        the same boxes-from-any-rank, on the placement of gather_hf and megatron_core

The hand-over is the same for all contenders of a table. `direct`: the engine's parameters are in the rank's process.
`shared-memory`: they are behind buckets in shared memory, from which SGLang's processes read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import torch.distributed as dist

from benchmarks.reshard.content import Shard
from benchmarks.reshard.full_gather import FULL_GATHERS, FullGather, FullGatherStrategy
from benchmarks.reshard.nccl_order import NcclOrderTransport
from benchmarks.reshard.slowed_links import SlowedLinks, SlowedTransport
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.scenario import Arrangement, Scenario, arrange, sync_context
from megarl.reshard.analysis.sync_report import time_planning
from megarl.reshard.layout.engine_ranks import needs_by_rank, place_engines_consecutively
from megarl.reshard.planning.strategy import DeltaUpdate, Sinks, Strategy, SyncStats
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.strategies.gather_hf import GatherHf
from megarl.reshard.transfer.bucket import Parameters, PrivateBuffer, make_buffer

HandOver = Literal["direct", "shared-memory"]
"""Location of the engine's parameters: in the rank's own process, or in another process behind shared memory."""

TransportName = Literal["default", "nccl-order"]
"""How messages are sent: by the ranks' backend, or by gloo with NCCL's rules (`benchmarks.reshard.nccl_order`)."""

GATHER_SERIAL = "gather_hf_serial"
EXACT_CONSECUTIVE = "exact_consecutive"

_LAYER = re.compile(r"\.layers\.(\d+)\.")

ONE_TENSOR_BYTES = 1
"""Bucket size of `gather_hf_serial`: a tensor larger than a bucket gets one of its own."""

TIMEOUT_SECONDS = 60.0
"""Timeout of a sync in NCCL's order, in which a plan may deadlock."""

LONG_TIMEOUT_SECONDS = 3600.0
"""Timeout of any other sync: its model may be large, and its links slowed."""


class Contender(Protocol):
    """A method of moving weights; its constructor and methods are collective over all ranks."""

    name: str
    hand_over: HandOver
    trained_layers: int | None
    """Set if only what has changed is sent after the first sync: the number of layers that change."""
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

    def __init__(
        self,
        name: str,
        scenario: Scenario,
        hand_over: HandOver,
        transport: TransportName,
        trained_layers: int | None = None,
        changed_share: float = 1.0,
        links: SlowedLinks | None = None,
    ) -> None:
        """Plan and create the strategy; raises ConfigError if it does not support these sizes.

        Args:
            links: of given rates, over which messages move in NCCL's order; None: as fast as possible.
            trained_layers: send only what has changed, of a model of which only so many last layers are trained.
            changed_share: of the elements of these layers, the share that changes.
        """
        self.trained_layers = trained_layers
        self._num_syncs = 0
        self.name, self.hand_over = name, hand_over
        self._rank = rank = dist.get_rank()
        if name == GATHER_SERIAL:
            scenario = replace(scenario, bucket_bytes=ONE_TENSOR_BYTES)
        full_gather = FullGather(name, scenario) if name in FULL_GATHERS else None
        if full_gather is None:
            self.arrangement = _arrange(name, scenario)
            self.plan_seconds = time_planning(self.arrangement, scenario, rank)
            self._plan = forecast(self.arrangement, scenario)
        else:
            self.arrangement = full_gather.arrangement
            self.plan_seconds = time_planning(full_gather.gather, full_gather.gather_scenario, rank)
            self._plan = full_gather.forecast()
        self._strategy = self._build(scenario, transport, links, full_gather)
        share = None if trained_layers is None else changed_share
        frozen = () if trained_layers is None else frozen_tensors(scenario.sources[rank].tensors, trained_layers)
        self._held = Shard(scenario.sources[rank], frozen=frozen, changed_share=share)
        need = self.arrangement.needs.get(rank)
        self._served = Shard(need, frozen=frozen, changed_share=share) if need is not None else None

    def _build(
        self, scenario: Scenario, transport: TransportName, links: SlowedLinks | None, full_gather: FullGather | None
    ) -> Strategy:
        context, bucket_bytes = sync_context(self.arrangement, scenario, self._rank), scenario.bucket_bytes
        if self.arrangement.strategy == "gather_hf":
            make_memory = PrivateBuffer if self.hand_over == "direct" else make_buffer
            return GatherHf(context, bucket_bytes, LONG_TIMEOUT_SECONDS, make_memory)
        if links is not None:
            return BoxStrategy(context, bucket_bytes, LONG_TIMEOUT_SECONDS, partial(SlowedTransport, links))
        is_ordered = transport == "nccl-order"
        timeout, make = (TIMEOUT_SECONDS, NcclOrderTransport) if is_ordered else (LONG_TIMEOUT_SECONDS, None)
        if full_gather is not None:
            return FullGatherStrategy(full_gather, self._rank, timeout_seconds=timeout, make_transport=make)
        return BoxStrategy(context, bucket_bytes, timeout, make)

    def fill(self, sync: int) -> None:
        """Fill the source with the weights of sync `sync`, and the destination with NaN if it is sent all of them."""
        self._held.fill(sync)
        if self._served is not None and (self.trained_layers is None or self._num_syncs == 0):
            self._served.fill_nan()

    def push(self) -> SyncStats:
        """Move the weights; return the counted statistics.

        Raises:
            AssertionError: the counted statistics differ from the plan's.
        """
        planned = self._plan.stats[self._rank]
        if self.trained_layers is not None:
            return self._push_delta(planned)
        counted = self._strategy.push(self._held.tensors, self._sinks())
        assert counted == planned, f"{self.name}, rank {self._rank}: counted {counted}, planned {planned}"
        return counted

    def _push_delta(self, planned: SyncStats) -> SyncStats:
        assert isinstance(self._strategy, BoxStrategy), f"{self.name} sends no boxes"
        number = self._num_syncs
        update = DeltaUpdate(number=number, base=number - 1 if number else None)
        counted = self._strategy.push(self._held.tensors, self._sinks(), update)
        self._num_syncs += 1
        received = counted.bytes_received - counted.count_bytes + counted.bytes_not_received
        delivered = counted.bytes_delivered + counted.bytes_not_delivered
        assert (received, delivered) == (planned.bytes_received, planned.bytes_delivered), (counted, planned)
        return counted

    def _sinks(self) -> Sinks:
        if self._served is None:
            return Sinks()
        if self._rank in self.arrangement.senders:
            return Sinks(full_tensors=(self._served,))
        return Sinks(boxes=Parameters(self._served.tensors) if self.hand_over == "direct" else self._served)

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


def frozen_tensors(names: Iterable[str], trained_layers: int) -> frozenset[str]:
    """Return the tensors outside of the last `trained_layers` layers."""
    layer_of = {name: int(found[1]) if (found := _LAYER.search(name)) else -1 for name in names}
    first = max(layer_of.values()) + 1 - trained_layers
    return frozenset(name for name, layer in layer_of.items() if layer < max(first, 0))


def _arrange(name: str, scenario: Scenario) -> Arrangement:
    match name:
        case "gather_hf_serial":
            return arrange("gather_hf", scenario)
        case "exact_consecutive":
            placements = place_engines_consecutively(scenario.replicas, gen_tp=scenario.gen_tp)
            needs = needs_by_rank(placements, scenario.engine)
            return Arrangement(strategy="exact", placements=placements, needs=needs)
    return arrange(name, scenario)
