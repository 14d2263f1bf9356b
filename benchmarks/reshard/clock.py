"""How long planned weight syncs take over links of given rates, against the least time of any method.

    python -m benchmarks.reshard.clock --json
    python -m benchmarks.reshard.clock --measure

Nothing is sent: plans of all ranks are simulated (`megarl.reshard.analysis.sync_clock`) for 20 layouts of models in
their published sizes, or with fewer layers and experts of that shape, on 2 to 16 machines of 8 ranks, some uneven.
Takes minutes. One object is printed for each layout:

    strategy            colocated: the one that `auto` takes; disaggregated: exact
    seconds_bound       least seconds of any method (`megarl.reshard.layout.lower_bounds.seconds_bound`)
    seconds_planned     of the simulated sync; ratio: over seconds_bound
    limit               what the ratio should be at most: 1.15, with fewer than 16 rounds 1.15 + hops / rounds
    seconds_by_strategy colocated: of each strategy; auto_over_best: that of auto over the least of them
    holder_deviation    bytes over the network: the most that a rank sends as one of several holders of the same boxes,
                        over their mean; largest over all sets of holders. Sets that send under 1 % of all are left out
    groups, p2p_calls   the most that one rank posts

With `--measure`, four layouts of small models really run, on 8 ranks on 2 machines in threads of this process, over
links slowed to rates in MB/s (`benchmarks.reshard.twin`, which describes what is printed). Takes minutes, asleep.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reshard import twin
from benchmarks.reshard.published import (
    BUCKET_BYTES,
    DEEPSEEK_V3,
    DTYPE,
    QWEN3_8B,
    QWEN3_30B_A3B,
    engine_layouts,
    index_of,
    nodes_of,
    time_index,
)
from benchmarks.reshard.synthetic import engine_layouts as synthetic_layouts
from benchmarks.reshard.synthetic import synthetic_model
from benchmarks.reshard.twin import TwinReport, make_report, run_sync, slowed_rates
from benchmarks.text_table import print_rows
from megarl.cli.tools.reshard_explain import GEN_AXES, TRAIN_AXES, link_rates, make_scenario, parse_sizes
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError, MegarlError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.reshard.analysis.forecast import time_sync
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.engine_ranks import resolve_strategy
from megarl.reshard.layout.layout import Boxes, WeightLayout, intersections
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.plan import RankPlan
from megarl.reshard.planning.plan_cache import cached_index

MACHINE = 8
"""Ranks of a machine."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "deepseek-v3, 8 layers, 64 experts": DEEPSEEK_V3
    | {"num_hidden_layers": 8, "n_routed_experts": 64, "num_nextn_predict_layers": 0},
}
DENSE, MOE, DEEPSEEK = MODELS

SMALL_MB, SMALL_BUCKET_BYTES = 48, 3 << 19
"""Size of the measured models, 10**6 bytes, and a bucket in the same ratio to it as 256 MiB to Qwen3-8B."""
SMALL_DENSE, SMALL_MOE = f"synthetic:{SMALL_MB}", f"synthetic-moe:{SMALL_MB}"
MEASURED_MACHINES = 2
MEASURED_NETWORK, MEASURED_NVLINK = 0.2, 1.6
"""10**6 bytes per second; in the ratio of 50 to 400 GB/s."""


@dataclass(frozen=True, slots=True)
class Case:
    """A layout of trainer and engines whose syncs are timed."""

    model: str
    train: str
    gen: str
    engines: int | None = None
    """Number of engines with machines of their own; None: colocated, on all ranks."""


CASES = (
    Case(DENSE, "pp=2,tp=4,dp=2", "tp=2"),
    Case(DENSE, "pp=4,tp=4,dp=2", "tp=4"),
    Case(DENSE, "pp=4,tp=8,dp=4", "tp=4"),
    Case(DENSE, "tp=4,dp=2", "tp=2", engines=4),
    Case(DENSE, "tp=8,dp=2", "tp=8", engines=8),
    Case(DEEPSEEK, "pp=4,tp=2,dp=8,ep=16,etp=1", "tp=16", engines=4),
    Case(DENSE, "tp=8,dp=2", "tp=4"),
    Case(DENSE, "pp=4,tp=2,dp=4", "tp=2"),
    Case(DENSE, "pp=2,tp=8,dp=2", "tp=8"),
    Case(DENSE, "pp=3,tp=4,dp=2", "tp=2"),
    Case(DENSE, "pp=2,tp=2,dp=6", "tp=4"),
    Case(DENSE, "pp=2,tp=4", "tp=2", engines=4),
    Case(DENSE, "tp=8", "tp=8", engines=3),
    Case(DENSE, "tp=2,dp=12", "tp=4", engines=4),
    Case(DENSE, "pp=2,tp=8,dp=4", "tp=8", engines=8),
    Case(MOE, "dp=16,ep=8", "tp=4"),
    Case(MOE, "pp=2,tp=2,dp=8,ep=8,etp=1", "tp=4"),
    Case(MOE, "pp=2,tp=2,dp=4,ep=8,etp=1", "tp=4", engines=4),
    Case(MOE, "dp=16,ep=16", "tp=4", engines=6),
    Case(DEEPSEEK, "pp=2,tp=4,dp=4,ep=16,etp=1", "tp=16", engines=2),
)


MEASURED = (
    Case(SMALL_DENSE, "pp=2,tp=2,dp=2", "tp=2"),
    Case(SMALL_DENSE, "pp=4,tp=2", "tp=4"),
    Case(SMALL_DENSE, "tp=2,dp=2", "tp=2", engines=2),
    Case(SMALL_MOE, "pp=2,dp=2,ep=2,etp=1", "tp=2", engines=2),
)
"""Layouts of 8 ranks that really run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReport:
    """The figures of one layout, as printed; see the module for their meaning."""

    model: str
    train: str
    gen: str
    engines: int | None
    ranks: int
    machines: int
    strategy: str
    rounds: int
    hops: int
    seconds_bound: float
    seconds_planned: float
    ratio: float
    limit: float
    seconds_by_strategy: dict[str, float]
    auto_over_best: float
    nic_share: float | None
    holder_deviation: float
    groups: int
    p2p_calls: int


def measure(case: Case, rates: LinkRates) -> ClockReport:
    """Plan and simulate the syncs of a layout."""
    model = load_architecture(MODELS[case.model], origin=case.model)
    return (
        _measure_colocated(case, model, rates) if case.engines is None else _measure_disaggregated(case, model, rates)
    )


def _measure_colocated(case: Case, model: ModelArchitecture, rates: LinkRates) -> ClockReport:
    def engine(tp: int, dtype: str, *, ep: int = 1, dp: int = 1) -> list[WeightLayout]:
        assert ep == dp == 1
        return engine_layouts(model.tensors(dtype), tp)

    ranks = RankGrid(**parse_sizes("--train", case.train, TRAIN_AXES)).size
    make = partial(make_scenario, case.model, model, DTYPE, bucket_bytes=BUCKET_BYTES, engine=engine)
    scenario = make(train=case.train, gen=case.gen, nodes=ranks // MACHINE)
    seconds = {}
    for name in ("gather_hf", "micro_dp", "exact"):
        try:
            seconds[name] = time_sync(arrange(name, scenario), scenario, rates).seconds_planned
        except ConfigError:
            continue  # the strategy does not support these sizes
    chosen = resolve_strategy("auto", scenario.grid, scenario.topology, gen_tp=scenario.gen_tp)
    arrangement = arrange(chosen, scenario)
    index = cached_index(
        scenario.sources, arrangement.needs, scenario.topology, BUCKET_BYTES, groups=arrangement.groups
    )
    return _report(case, index, chosen, seconds, rates)


def _measure_disaggregated(case: Case, model: ModelArchitecture, rates: LinkRates) -> ClockReport:
    grid = RankGrid(**parse_sizes("--train", case.train, TRAIN_AXES))
    tp, engines = parse_sizes("--gen", case.gen, GEN_AXES)["tp"], case.engines
    assert engines is not None
    sources = trainer_layouts(model, grid, DTYPE)
    spec = TransferSpec(
        sources=sources,
        needs=engine_layouts(sources[0].tensors, tp),
        num_engines=engines,
        nodes=nodes_of(grid.size, engines * tp, MACHINE),
        bucket_bytes=BUCKET_BYTES,
    )
    return _report(case, index_of(spec), "exact", {}, rates)


def run_slowed(case: Case, rates: LinkRates) -> TwinReport:
    """Run a sync of a small model with strategy exact over links of these rates."""
    model = synthetic_model(SMALL_MB, is_moe=case.model == SMALL_MOE)
    grid = RankGrid(**parse_sizes("--train", case.train, TRAIN_AXES))
    engine = partial(synthetic_layouts, model)
    if case.engines is None:
        make = partial(make_scenario, case.model, model, DTYPE, bucket_bytes=SMALL_BUCKET_BYTES, engine=engine)
        scenario = make(train=case.train, gen=case.gen, nodes=MEASURED_MACHINES)
        sources: Sequence[WeightLayout] = scenario.sources
        needs, topology = arrange("exact", scenario).needs, scenario.topology
    else:
        tp = parse_sizes("--gen", case.gen, GEN_AXES)["tp"]
        spec = TransferSpec(
            sources=trainer_layouts(model, grid, DTYPE),
            needs=engine(tp, DTYPE),
            num_engines=case.engines,
            nodes=nodes_of(grid.size, case.engines * tp, grid.size),
            bucket_bytes=SMALL_BUCKET_BYTES,
        )
        (sources, needs), topology = spec.layouts(), Topology(spec.nodes)
    timed = time_index(cached_index(sources, needs, topology, SMALL_BUCKET_BYTES), rates)
    return make_report(
        run_sync(sources, needs, topology, SMALL_BUCKET_BYTES, rates),
        timed.timing,
        timed.seconds_bound,
        rates,
        strategy="exact",
        **asdict(case),
        topology=topology,
    )


def _report(case: Case, index: SyncIndex, strategy: str, seconds: dict[str, float], rates: LinkRates) -> ClockReport:
    timed = time_index(index, rates)
    plans, timing, bound = timed.plans, timed.timing, timed.seconds_bound
    seconds = {name: round(value, 9) for name, value in (seconds or {strategy: timing.seconds_planned}).items()}
    slack = index.num_hops / index.num_rounds if index.num_rounds < 16 else 0
    return ClockReport(
        **asdict(case),
        ranks=len(index.sources),
        machines=len(index.topology.ranks_of),
        strategy=strategy,
        rounds=index.num_rounds,
        hops=index.num_hops,
        seconds_bound=round(bound, 9),
        seconds_planned=round(timing.seconds_planned, 9),
        ratio=_ratio(timing.seconds_planned, bound),
        limit=round(1.15 + slack, 3),
        seconds_by_strategy=seconds,
        auto_over_best=_ratio(seconds[strategy], min(seconds.values())),
        nic_share=None if timing.nic_share is None else round(timing.nic_share, 3),
        holder_deviation=round(holder_deviation(index, plans), 3),
        groups=timing.groups,
        p2p_calls=timing.p2p_calls,
    )


def _ratio(seconds: float, least: float) -> float:
    """Return how much longer it takes; 1 if both are 0, as where nothing is sent."""
    return 1.0 if seconds == least else round(seconds / least, 3)


def holder_deviation(index: SyncIndex, plans: Sequence[RankPlan]) -> float:
    """Return the most bytes over the network of one of several holders over their mean, of the worst set of holders."""
    nodes = np.array(index.topology.nodes)
    sent = np.zeros((len(index.holders), len(nodes)), np.int64)
    for plan in plans:
        moves = plan.receives
        moves = moves.take(np.flatnonzero((moves.hop == 0) & (nodes[moves.peer] != nodes[plan.rank]) & ~plan.gathered))
        boxes = Boxes(moves.tensor, moves.start, moves.stop, moves.shift, moves.local)
        at, of, _, _ = intersections(boxes, index.held, index.held_start, index.held_count)
        np.add.at(sent, (index.held_by[of], moves.peer[at]), moves.num_bytes[at])
    total = sent.sum()
    worst = 1.0
    for holders, of_ranks in zip(index.holders, sent, strict=True):
        if len(holders) > 1 and of_ranks.sum() > 0.01 * total:
            worst = max(worst, float(of_ranks.max() / of_ranks[list(holders)].mean()))
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of each layout."""
    args = _parser().parse_args(arguments)
    try:
        return _measure_slowed(args) if args.measure else _simulate(args)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _simulate(args: argparse.Namespace) -> int:
    rates = link_rates(
        network_gb_per_second=args.network_gb_per_second,
        nvlink_gb_per_second=args.nvlink_gb_per_second,
        nics_per_machine=None,
    )
    for number in _cases(args, CASES):
        report = asdict(measure(CASES[number], rates))
        if args.json:
            print(json.dumps(report), flush=True)
        else:
            print(" ".join(f"{name}={value}" for name, value in report.items()), flush=True)
    return 0


def _measure_slowed(args: argparse.Namespace) -> int:
    rates = slowed_rates(args.network_mb_per_second, args.nvlink_mb_per_second)
    torch.set_num_threads(1)
    reports = []
    for number in _cases(args, MEASURED):
        reports.append(run_slowed(MEASURED[number], rates))
        if args.json:
            print(json.dumps(asdict(reports[-1])), flush=True)
    if not args.json:
        print_rows(twin.COLUMNS, twin.rows(reports), twin.NUM_TEXT_COLUMNS)
    if args.write:
        args.write.write_text(twin.page(reports))
    return 0


def _cases(args: argparse.Namespace, cases: Sequence[Case]) -> Sequence[int]:
    """Return the numbers of the cases to run.

    Raises:
        ConfigError: there is no such case.
    """
    for number in args.cases or ():
        if not 0 <= number < len(cases):
            raise ConfigError(f"--cases needs numbers from 0 to {len(cases) - 1}, got {number}")
    chosen: Sequence[int] = args.cases or range(len(cases))
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.reshard.clock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network-gb-per-second", type=float, default=50, help="of one NIC, one for each rank")
    parser.add_argument(
        "--nvlink-gb-per-second", type=float, default=400, help="between a rank and those of its machine"
    )
    parser.add_argument("--measure", action="store_true", help="run small models over slowed links instead")
    parser.add_argument("--network-mb-per-second", type=float, default=MEASURED_NETWORK, help="with --measure")
    parser.add_argument("--nvlink-mb-per-second", type=float, default=MEASURED_NVLINK, help="with --measure")
    parser.add_argument("--cases", type=int, nargs="+", metavar="N", help="layouts (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE", help="with --measure: write the table to a Markdown file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
