"""Whether a run fits the memory of its GPUs: tables by phase and owner, and problems, for `megarl check --gpu`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.run import RunConfig, StageConfig
from megarl.run.memory.gpu_demand import GIB, USABLE_FRACTION, GpuDemand, gpu_demands, gpu_memory, longest_sequence
from megarl.run.memory.step_ledger import (
    ENGINE,
    LABELS,
    EngineFraction,
    Holdings,
    choose_mem_fraction,
    step_ledger,
    with_fraction,
)

FIELDS_TO_CHANGE = {
    "activations": "trainer.recompute, trainer.max_tokens_per_micro_batch, trainer.parallel",
    "language head": "trainer.fused_lm_head, trainer.max_tokens_per_micro_batch, trainer.parallel",
    "state": "trainer.parallel, trainer.optimizer.distributed, trainer.offload, placement",
    "engine": "rollout.tp, rollout.engine.mem_fraction, rollout.engine.release_memory, placement.rollout.pool",
}
"""Kind of owner -> configuration fields that make it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """Memory of the GPU of a pool that needs most."""

    gpu: str
    demand: GpuDemand
    num_gpus: int
    """Number of GPUs of the pool."""
    peaks: dict[str, Holdings]
    """Phase -> holdings at its peak."""
    fraction: EngineFraction | None = None
    """Of the engine rank, if there is one."""
    kv_bytes: int = 0
    """Size of the KV cache; 0 or less if no memory is left for it."""

    @property
    def gpu_bytes(self) -> int:
        """Memory of the GPU."""
        return gpu_memory(self.gpu)

    @property
    def place(self) -> str:
        """The GPU, in words."""
        return f"GPU {self.demand.rank} of pool {self.demand.pool}"

    @property
    def peak(self) -> int:
        """Bytes at the peak of the largest phase."""
        return max((holdings.total for holdings in self.peaks.values()), default=0)

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return self.peak <= self.gpu_bytes


def report_memory(config: StageConfig, gpu: str) -> list[GpuReport]:
    """Return a report for each pool, of its GPU with the highest peak; the configuration needs to be valid.

    Args:
        gpu: name of the GPU of all slots.

    Raises:
        ConfigError: the name is unknown.
    """
    gpu_bytes = gpu_memory(gpu)
    demands = gpu_demands(config, gpu_bytes)
    fraction = choose_mem_fraction(config, demands, gpu_bytes) if isinstance(config, RunConfig) else None
    worst: dict[str, GpuReport] = {}
    for demand in demands:
        kv_bytes = 0
        if fraction is not None and demand.engine is not None:
            demand, kv_bytes = with_fraction(demand, fraction, gpu_bytes)
        report = GpuReport(
            gpu=gpu,
            demand=demand,
            num_gpus=config.placement.all_pools[demand.pool].slots,
            peaks=step_ledger(demand, max(0, kv_bytes)).peaks,
            fraction=None if demand.engine is None else fraction,
            kv_bytes=kv_bytes,
        )
        if demand.pool not in worst or report.peak > worst[demand.pool].peak:
            worst[demand.pool] = report
    return list(worst.values())


def find_memory_problems(config: StageConfig, reports: list[GpuReport]) -> Iterator[str]:
    """Yield a sentence with the arithmetic for each phase that does not fit, and for a KV cache that is too small."""
    for report in reports:
        for phase, holdings in report.peaks.items():
            if holdings.total > report.gpu_bytes:
                yield (
                    f"--gpu: {phase} does not fit {report.gpu}: {report.place} needs {holdings.arithmetic()} > "
                    f"{_gib(report.gpu_bytes)}; change one of {_advice(holdings)}"
                )
        if report.fits and report.fraction is not None and report.demand.engine is not None:
            per_token, longest = report.demand.engine.kv_per_token, longest_sequence(config)
            if report.kv_bytes < per_token * longest:
                yield (
                    f"--gpu: sampling does not fit {report.gpu}: on {report.place} {max(0, report.kv_bytes) / GIB:.2f} "
                    f"GiB are left for the KV cache, one sequence needs {longest:,} tokens * {per_token:,} bytes = "
                    f"{per_token * longest / GIB:.2f} GiB; change one of {FIELDS_TO_CHANGE['engine']}"
                )


def describe_memory(report: GpuReport) -> list[str]:
    """Return the lines of a table: owners by phase at its peak, totals, what is left, and the engine's KV cache."""
    phases = list(report.peaks)
    accounts = list(dict.fromkeys(account for holdings in report.peaks.values() for account in holdings.by_account))
    rows = [
        (
            process,
            LABELS.get(owner, owner),
            [report.peaks[phase].by_account.get((process, owner), 0) for phase in phases],
        )
        for process, owner in sorted(accounts, key=lambda account: account[0] == ENGINE)
    ]
    rows = [row for row in rows if any(row[2])]
    totals = [report.peaks[phase].total for phase in phases]
    rows += [("total", "", totals), ("left", "", [report.gpu_bytes - total for total in totals])]
    width = max(len(owner) for _, owner, _ in rows)
    lines = [
        f"memory of {report.place}, which needs most of {report.num_gpus}: {report.gpu}, {_gib(report.gpu_bytes)} GiB; "
        "GiB at the peak of each phase",
        " " * (width + 8) + "".join(f"{phase:>10}" for phase in phases),
    ]
    for process, owner, amounts in rows:
        cells = "".join(f"{num_bytes / GIB:>10.2f}" if num_bytes else f"{'-':>10}" for num_bytes in amounts)
        lines.append(f"{process:<8}{owner:<{width}}{cells}")
    if report.fraction is not None and report.demand.engine is not None:
        tokens = max(0, report.kv_bytes) // report.demand.engine.kv_per_token
        fraction = report.fraction
        chosen = f"{fraction.origin} {fraction.value:.3f}" if fraction.value else "no mem_fraction fits all phases"
        lines.append(f"engine: {chosen}; the KV cache has room for {tokens:,} tokens")
    if report.demand.models and report.fits and report.peak > USABLE_FRACTION * report.gpu_bytes:
        lines.append(f"less than {1 - USABLE_FRACTION:.0%} is left, which fragmentation may take")
    return lines


def _advice(holdings: Holdings) -> str:
    """Return the fields that change the kinds of owners with at least a tenth of the memory, largest first."""
    sizes: Counter[str] = Counter()
    for (process, owner), num_bytes in holdings.by_account.items():
        kind = next((kind for kind in FIELDS_TO_CHANGE if kind in owner), "state")
        sizes["engine" if process == ENGINE else kind] += num_bytes
    fields = [FIELDS_TO_CHANGE[kind] for kind, size in sizes.most_common() if size >= holdings.total / 10]
    return ", ".join(dict.fromkeys(", ".join(fields).split(", ")))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"
