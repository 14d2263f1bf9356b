"""A sync on the real `BoxExecutor` over links of given rates (`slowed_links`), against its planned time and its bound.

seconds_measured     of the sync on this machine, whose links are slowed to the given rates
seconds_planned      of the plan at these rates (`megarl.reshard.analysis.sync_clock`), without any CPU time
seconds_bound        least seconds of any method at these rates (`megarl.reshard.layout.lower_bounds.seconds_bound`)
busiest_link_seconds the longest that one link was occupied: its bytes over its rate
mismatched_bytes     wrong bytes in the engines' parameters; all are compared
cpu_share            CPU seconds of all ranks over seconds_measured; measured times mean little where it is large
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.reshard.contender import LONG_TIMEOUT_SECONDS
from benchmarks.reshard.content import Shard
from benchmarks.reshard.slowed_links import SlowedLinks, SlowedTransport
from benchmarks.text_table import markdown_rows
from megarl.errors import ConfigError
from megarl.reshard.analysis.sync_clock import SyncTiming
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.transfer.bucket import Parameters
from megarl.reshard.transfer.executor import BoxExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinReport:
    """The figures of one sync, as printed; see the module for their meaning."""

    strategy: str
    model: str
    train: str
    gen: str
    engines: int | None
    """Number of engines with machines of their own; None: colocated, on all ranks."""
    ranks: int
    machines: int
    network_mb_per_second: float
    nvlink_mb_per_second: float
    seconds_measured: float
    seconds_planned: float
    seconds_bound: float
    measured_over_planned: float
    measured_over_bound: float
    busiest_link_seconds: float
    cpu_share: float
    mismatched_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one sync."""

    seconds: float
    cpu_seconds: float
    """Of all ranks together."""
    busiest_link_seconds: float
    mismatched_bytes: int


def rounded(value: float) -> float:
    """Return the number with four significant digits."""
    return float(f"{value:.4g}")


def slowed_rates(network_mb_per_second: float, nvlink_mb_per_second: float) -> LinkRates:
    """Return the rates of options of the command line, which give them in 10^6 bytes per second.

    Raises:
        ConfigError: a number is not positive.
    """
    rates = {"--network-mb-per-second": network_mb_per_second, "--nvlink-mb-per-second": nvlink_mb_per_second}
    for option, rate in rates.items():
        if not 0 < rate < float("inf"):
            raise ConfigError(f"{option} needs a positive number, got {rate:g}")
    return LinkRates(network=network_mb_per_second * 1e6, nvlink=nvlink_mb_per_second * 1e6)


def make_report(
    measured: Measured,
    planned: SyncTiming,
    bound: float,
    rates: LinkRates,
    *,
    strategy: str,
    model: str,
    train: str,
    gen: str,
    topology: Topology,
    engines: int | None = None,
) -> TwinReport:
    """Compare measured with planned seconds and with the bound."""
    return TwinReport(
        strategy=strategy,
        model=model,
        train=train,
        gen=gen,
        engines=engines,
        ranks=len(topology.nodes),
        machines=len(topology.ranks_of),
        network_mb_per_second=rates.network / 1e6,
        nvlink_mb_per_second=rates.nvlink / 1e6,
        seconds_measured=rounded(measured.seconds),
        seconds_planned=rounded(planned.seconds_planned),
        seconds_bound=rounded(bound),
        measured_over_planned=rounded(measured.seconds / planned.seconds_planned),
        measured_over_bound=rounded(measured.seconds / bound),
        busiest_link_seconds=rounded(measured.busiest_link_seconds),
        cpu_share=rounded(measured.cpu_seconds / measured.seconds),
        mismatched_bytes=measured.mismatched_bytes,
    )


COLUMNS = (
    "strategy",
    "model",
    "train -> gen",
    "machines",
    "measured s",
    "planned s",
    "bound s",
    "measured / planned",
    "measured / bound",
    "busiest link s",
    "CPU share",
    "wrong bytes",
)
NUM_TEXT_COLUMNS = 3


def rows(reports: Sequence[TwinReport]) -> list[list[str]]:
    """Return table rows under `COLUMNS`."""
    return [
        [
            r.strategy,
            r.model,
            f"{r.train} -> {f'{r.engines} x ' if r.engines else ''}{r.gen}",
            str(r.machines),
            f"{r.seconds_measured:.2f}",
            f"{r.seconds_planned:.2f}",
            f"{r.seconds_bound:.2f}",
            f"{r.measured_over_planned:.2f}",
            f"{r.measured_over_bound:.2f}",
            f"{r.busiest_link_seconds:.2f}",
            f"{100 * r.cpu_share:.1f} %",
            str(r.mismatched_bytes),
        ]
        for r in reports
    ]


def page(reports: Sequence[TwinReport]) -> str:
    """Return the page with what `python -m benchmarks.reshard.clock --measure` has measured, as Markdown."""
    network, nvlink = reports[0].network_mb_per_second, reports[0].nvlink_mb_per_second
    introduction = f"""\
# Weight sync over slowed links: measured, planned and least seconds

Written by `python -m benchmarks.reshard.clock --measure --write benchmarks/results/reshard-twin.md`. The real executor
ran on 8 ranks in threads of one process, over gloo in NCCL's order, with links slowed to {network:g} MB/s for each NIC
and {nvlink:g} MB/s between a rank and those of its machine. The number after a model is its size in MB; buckets are in
the same ratio to it as 256 MiB to Qwen3-8B. Planned seconds have no CPU time in them; the CPU share is that of all
ranks together in the measured seconds. All received bytes were compared.
"""
    return "\n".join([introduction, markdown_rows(COLUMNS, rows(reports), NUM_TEXT_COLUMNS)])


def run_sync(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    bucket_bytes: int,
    rates: LinkRates,
) -> Measured:
    """Run one sync without all-gathers, with each rank in a thread of this process, and compare every byte."""
    with tempfile.NamedTemporaryFile() as file:
        return Twin(sources, needs, topology, bucket_bytes, rates, Path(file.name)).run()


class Twin:
    """The ranks of one sync, in threads."""

    def __init__(
        self,
        sources: Sequence[WeightLayout],
        needs: Mapping[int, WeightLayout],
        topology: Topology,
        bucket_bytes: int,
        rates: LinkRates,
        file: Path,
    ) -> None:
        self._topology, self._rates, self._file = topology, rates, file
        self._plans = [cached_plan(sources, needs, topology, rank, bucket_bytes) for rank in range(len(sources))]
        self._held = [Shard(source) for source in sources]
        self._served = {rank: Shard(need) for rank, need in needs.items()}
        for shard in self._held:
            shard.fill(0)
        for shard in self._served.values():
            shard.fill_nan()
        self._store, self._barrier = HashStore(), threading.Barrier(len(sources), timeout=LONG_TIMEOUT_SECONDS)

    def run(self) -> Measured:
        """Run the sync, and compare every byte."""
        world = len(self._plans)
        with closing(SlowedLinks(self._file, self._topology, self._rates)) as links:
            with ThreadPoolExecutor(world) as pool:
                times = list(pool.map(self._run_rank, range(world)))
            starts, cpu_starts, ends, cpu_ends = zip(*times, strict=True)
            return Measured(
                seconds=max(ends) - min(starts),
                cpu_seconds=max(cpu_ends) - min(cpu_starts),
                busiest_link_seconds=max(float(links.seconds("nvlink").max()), float(links.seconds("nic").max())),
                mismatched_bytes=sum(shard.mismatched_bytes(0) for shard in self._served.values()),
            )

    def _run_rank(self, rank: int) -> tuple[float, float, float, float]:
        """Return start, CPU time of the process at the start, end and CPU time at the end of the sync."""
        never = timedelta(seconds=LONG_TIMEOUT_SECONDS)
        group = dist.ProcessGroupGloo(self._store, rank, len(self._plans), never)
        plan, served = self._plans[rank], self._served.get(rank)
        with (
            closing(SlowedLinks(self._file, self._topology, self._rates)) as links,
            closing(SlowedTransport(links, group, LONG_TIMEOUT_SECONDS)) as transport,
        ):
            transport.connect()
            executor = BoxExecutor(rank, plan.rounds, plan.buffer_sizes, transport=transport)
            self._barrier.wait()
            start = time.perf_counter(), time.process_time()
            executor.run(self._held[rank].tensors, None if served is None else Parameters(served.tensors))
            end = time.perf_counter(), time.process_time()
            self._barrier.wait()
        return (*start, *end)
