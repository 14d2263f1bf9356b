"""`megarl check`: find the errors of a configuration on a CPU, without starting a process of the run.

It imports, and so executes, the modules that the configuration names by import path, such as reward functions. It runs
reference solutions of data files in the sandboxes of rewards of type `code`. With `--gpu`, tables by phase and owner
tell whether the run fits the memory of its GPUs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.cli.options import add_config_options
from megarl.cluster.launch.node_world import parse_time_limit
from megarl.cluster.placement.assign import ClusterNode, assign_nodes, planned_nodes, resolve_device
from megarl.config import STAGES, dump_config, load_config
from megarl.config.limits import describe_auto, describe_healthy
from megarl.config.run import RunConfig, StageConfig
from megarl.config.section import recorded_imports
from megarl.controller.preflight.data_checks import find_template_notices, report_code_rows
from megarl.controller.preflight.data_report import FileReport
from megarl.controller.preflight.machine_checks import find_device
from megarl.controller.preflight.model_checks import (
    describe_policy,
    describe_trainer,
    find_model_notices,
    require_attention,
    will_write_model,
)
from megarl.controller.preflight.run_checks import (
    check_offline,
    check_or_raise,
    find_journal_notices,
    find_schedule_notices,
    find_warmup_notices,
)
from megarl.controller.preflight.weight_sync_checks import describe_sync_time, find_weight_sync_notices
from megarl.data.data_files import with_local_data
from megarl.errors import ConfigError
from megarl.model_files.hub import with_local_models
from megarl.run.memory.gpu_demand import (
    GIB,
    USABLE_FRACTION,
    GpuDemand,
    gpu_demands,
    gpu_memory,
    gpu_type,
    longest_sequence,
)
from megarl.run.memory.step_ledger import (
    ENGINE,
    LABELS,
    EngineFraction,
    Holdings,
    choose_mem_fraction,
    step_ledger,
    with_fraction,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG [--set KEY=VALUE ...] [--stage ...] [--gpu NAME]`, and the nodes and time limit of a job."""
    add_config_options(parser)
    parser.epilog = (
        "No process of the run is started, but modules that CONFIG names by import path (package.module:name), such as "
        "reward functions, are imported, which executes them: check only configurations that you trust. A line of the "
        "output names each of them."
    )
    parser.add_argument("--stage", choices=tuple(STAGES), default="train", help="command that CONFIG is for")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="check keys, types and contradictions only: CONFIG alone is read, and a comment names what is skipped",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="check and print what each phase takes of the memory of such GPUs: h100-80, ..."
    )
    job = parser.add_argument_group("for a job on other nodes; of a heterogeneous job, one number per component")
    job.add_argument("--nodes", type=int, nargs="+", metavar="N", help="number of nodes")
    job.add_argument("--gpus-per-node", type=int, nargs="+", metavar="N", help="GPUs per node")
    job.add_argument(
        "--cpus-per-node", type=int, nargs="+", metavar="N", help="CPU slots per node, for runs without GPUs"
    )
    job.add_argument("--time", metavar="LIMIT", help="time limit of the job, in the format of sbatch --time")


def run(args: argparse.Namespace) -> int:
    """Print the resolved configuration as YAML; the last line is a comment that starts with `ok`.

    Before it, a comment names each module that was imported, and another the parameters and layers that the model's
    config.json describes; both also if problems were found.

    Raises:
        ConfigError: lists all problems.
    """
    nodes = _planned_nodes(args)
    if args.time is not None:
        parse_time_limit(args.time)
    if args.offline and args.gpu:
        raise ConfigError("--gpu: needs the model in model.path, which --offline does not read")
    slots = None if nodes is None or args.stage == "train" else (len(nodes), max(nodes[0].gpus, nodes[0].cpus))
    reports, policy = list[FileReport](), list[str]()
    with recorded_imports() as imported:
        try:
            config = load_config(STAGES[args.stage], args.config, args.overrides, slots=slots)
            if args.offline:
                return _check_offline(config, nodes, args.stage)
            config = with_local_data(with_local_models(config))
            policy = describe_policy(config)
            check_or_raise(config, nodes, reports)
            code_rows = report_code_rows(config) if isinstance(config, RunConfig) else []
            memory = _describe_memory(config, args.gpu) if args.gpu else []
        finally:
            for key, path in imported.items():
                print(f"# imported {path.partition(':')[0]} for {key}: {path}")
            for line in policy:
                print(f"# {line}")
    print(dump_config(config), end="")
    device = find_device(config.placement, nodes)
    for line in describe_trainer(config, device):
        print(f"# {line}")
    limits = _describe_limits(config, device) if isinstance(config, RunConfig) and device is not None else []
    code_lines = [line for report in code_rows for line in report.lines()]
    data_lines = [line for report in reports for line in report.lines()]
    for line in [*data_lines, *limits, *(_describe_pools(config, nodes) if nodes else ()), *memory, *code_lines]:
        print(f"# {line}")
    notices = [*find_weight_sync_notices(config, device), *describe_sync_time(config, device)]
    if isinstance(config, RunConfig):
        notices = [*notices, *find_schedule_notices(config), *find_journal_notices(config)]
    for notice in (
        *find_model_notices(config),
        *find_warmup_notices(config),
        *find_template_notices(config),
        *notices,
    ):
        print(f"# {notice}")
    print(f"# ok: no problems found for megarl {args.stage}")
    return 0


def _check_offline(config: StageConfig, nodes: Sequence[ClusterNode] | None, stage: str) -> int:
    skipped = check_offline(config, nodes)
    print(dump_config(config), end="")
    for notice in find_warmup_notices(config):
        print(f"# {notice}")
    print(f"# skipped, because they need the model, the data, modules of yours or the machine: {', '.join(skipped)}")
    print(f"# ok: no problems found offline for megarl {stage}")
    return 0


def _describe_limits(config: RunConfig, device: str) -> list[str]:
    """Return one line per limit of the difference between trainer and engines, with values measured in the demo."""
    dtype = config.model.resolved_dtype(device)
    auto, lines = config.limits.auto_keys, []
    for key, limit in config.limits.resolved(dtype).mismatch.items():
        rule = describe_auto(key, dtype) if key in auto else f"{limit.max:g}" if limit.max is not None else ""
        healthy = describe_healthy(key, dtype)
        lines += [f"limits.{key}: {rule}{healthy and f' ({healthy})'}"] if rule else []
    return lines


def _planned_nodes(args: argparse.Namespace) -> list[ClusterNode] | None:
    """Return the nodes that the job would get, or None where the run is for this machine."""
    each = {"--nodes": args.nodes, "--gpus-per-node": args.gpus_per_node, "--cpus-per-node": args.cpus_per_node}
    given = {name: counts for name, counts in each.items() if counts is not None}
    if not given:
        return None
    if "--nodes" not in given or len(given) == 1:
        raise ConfigError(
            f"--nodes needs --gpus-per-node or --cpus-per-node, and those need --nodes, got {' '.join(given)}"
        )
    components = len(args.nodes)
    for name, counts in given.items():
        if len(counts) != components:
            raise ConfigError(f"{name}: needs one number per value of --nodes, got {len(counts)} for {components}")
        least = 1 if name == "--nodes" else 0
        if min(counts) < least:
            raise ConfigError(f"{name}: needs numbers of at least {least}, got {min(counts)}")
    none = [0] * components
    return planned_nodes(args.nodes, gpus=args.gpus_per_node or none, cpus=args.cpus_per_node or none)


def _describe_memory(config: StageConfig, gpu: str) -> list[str]:
    """Return the tables of GPU memory.

    Raises:
        ConfigError: a phase does not fit, or the policy has no attention kernels on these GPUs.
    """
    if will_write_model(config):
        raise ConfigError(f"--gpu: needs the model in model.path, {config.model.path} has not been written yet")
    require_attention(config, gpu_type(gpu))
    reports = report_memory(config, gpu)
    lines = [line for report in reports for line in describe_memory(report)]
    if problems := [*find_memory_problems(config, reports)]:
        print("".join(f"# {line}\n" for line in lines), end="")
        raise ConfigError("\n".join(problems))
    return lines


def _describe_pools(config: StageConfig, nodes: Sequence[ClusterNode]) -> list[str]:
    """Return one line per pool with its nodes, one per engine that spans nodes, and one for idle slots."""
    placement = config.placement
    device = resolve_device(placement, nodes)
    unit = "GPUs" if device == "cuda" else "CPU slots"
    chosen = assign_nodes(placement.all_pools, nodes, device)
    lines = []
    for name, pool in placement.all_pools.items():
        hostnames = " ".join(node.hostname for node in chosen[name])
        lines.append(f"pool {name}: {pool.slots_per_node} {unit} on each of {hostnames}")
    if isinstance(config, RunConfig) and (spanned := config.nodes_per_engine) > 1:
        hosts = chosen[placement.rollout.pool]
        for replica in range(config.rollout.replicas):
            names = " ".join(node.hostname for node in hosts[replica * spanned : (replica + 1) * spanned])
            lines.append(f"engine {replica}: tensor-parallel ranks 0 to {config.rollout.tp - 1} on {names}, in order")
    idle = sum(node.slots(device) for node in nodes) - placement.total_slots
    return [*lines, f"idle: {idle} {unit}"] if idle else lines


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
