"""Compares weight-sync strategies on real ranks.

torchrun --nproc-per-node 8 -m benchmarks.reshard --model synthetic:64 --train tp=4,dp=2 --gen tp=2 --json

With rates of links, the strategies that send boxes run over links slowed to them (`slowed_links`), and one object with
measured and planned times is printed for each (`twin`). Without torchrun, the ranks are started here:

python -m benchmarks.reshard --transport nccl-order --network-mb-per-second 1 --nvlink-mb-per-second 8 --machines 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from benchmarks.reshard import twin
from benchmarks.reshard.contender import (
    EXACT_CONSECUTIVE,
    GATHER_SERIAL,
    Contender,
    HandOver,
    MegarlContender,
    TransportName,
)
from benchmarks.reshard.full_gather import FULL_GATHERS
from benchmarks.reshard.measure import WARM_UP_SYNCS, MeasuredReport, measure
from benchmarks.reshard.megatron_limits import megatron_grids, require_megatron_core_support
from benchmarks.reshard.show import MEGATRON_CORE, NCCL_M2N, LeftOut, plot, print_table
from benchmarks.reshard.slowed_links import shared_links
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from benchmarks.reshard.twin import Measured, TwinReport, make_report, slowed_rates
from benchmarks.text_table import print_rows
from megarl.cli.tools.reshard_explain import TRAIN_AXES, make_scenario, model_name, parse_sizes
from megarl.cluster.placement.hardware import use_network_to_master
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError, MegarlError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.runtime import platform
from megarl.reshard.analysis.forecast import time_sync
from megarl.reshard.analysis.scenario import Scenario, even_nodes
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.lower_bounds import seconds_bound
from megarl.reshard.layout.topology import LinkRates

CONTENDERS = (
    *FULL_GATHERS,
    GATHER_SERIAL,
    "gather_hf",
    MEGATRON_CORE,
    NCCL_M2N,
    EXACT_CONSECUTIVE,
    "exact",
    "micro_dp",
)
"""Names of all contenders, in the order in which reports list them."""

POINT_TO_POINT = (*FULL_GATHERS, EXACT_CONSECUTIVE, "exact", "micro_dp")
"""Strategies that use a transport."""

BOXES = (EXACT_CONSECUTIVE, "exact", "micro_dp")
"""Strategies that can leave out what has not changed."""

MIN_SYNCS = 3
"""With three syncs, an error that appears only after the first sync has two chances to appear."""


REPEATS, BUCKET_MB = 5, 32
SLOWED_BUCKET_MB = 1.5
"""In the ratio to `MODEL` that 256 MiB have to a model of 8 billion parameters."""

MODEL, TRAIN, GEN = "synthetic:48", "pp=2,tp=2,dp=2", "tp=2"
"""What is measured unless the command says otherwise."""


def main() -> int:
    """Measure each strategy and print a report on rank 0; return the exit code."""
    args = _parser().parse_args()
    if "RANK" not in os.environ:
        return _start_ranks(args)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
    if platform.is_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://"))
    use_network_to_master(store, rank, size)
    dist.init_process_group(platform.backend(), store=store, rank=rank, world_size=size)
    reports: Sequence[MeasuredReport] | Sequence[TwinReport]
    try:
        reports = _run(args) if _rates(args) is None else _run_slowed(args)
    except MegarlError as error:
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 1 if any(report.mismatched_bytes for report in reports) else 0


def _start_ranks(args: argparse.Namespace) -> int:
    """Run this command with torchrun, on as many ranks as the trainer has."""
    try:
        _require_valid(args)
        sizes = parse_sizes("--train", args.train[0], TRAIN_AXES)
        sizes.pop("vpp", None)
        ranks = RankGrid(**sizes).size
        if args.nodes < 1:
            raise ConfigError(f"--machines needs to be at least 1, got {args.nodes}")
        if args.nodes > ranks:
            raise ConfigError(f"--machines needs at most one machine for each of {ranks} ranks, got {args.nodes}")
        even_nodes(ranks, args.nodes)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    start = [torchrun, "--standalone", "--nproc-per-node", str(ranks), "-m", "benchmarks.reshard", *sys.argv[1:]]
    return subprocess.run(start, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def _rates(args: argparse.Namespace) -> LinkRates | None:
    """Return the rates of links; None: they are as fast as they can be."""
    network, nvlink = args.network_mb_per_second, args.nvlink_mb_per_second
    if network is None and nvlink is None:
        return None
    if network is None or nvlink is None:
        raise ConfigError("--network-mb-per-second and --nvlink-mb-per-second need each other")
    return slowed_rates(network, nvlink)


def _require_valid(args: argparse.Namespace) -> None:
    if _rates(args) is not None:
        if args.transport != "nccl-order" or args.delta is not None:
            raise ConfigError("--network-mb-per-second needs --transport nccl-order, without --delta")
        if left_out := sorted(set(args.strategies) - {"all", *BOXES}):
            raise ConfigError(f"--network-mb-per-second needs strategies of {', '.join(BOXES)}, got {left_out[0]}")
    if len(args.train) != len(args.gen):
        raise ConfigError(f"--gen needs as many layouts as --train, got {len(args.gen)} and {len(args.train)}")
    if not 0.0 < args.changed_share <= 1.0 or (args.changed_share < 1.0 and args.delta is None):
        raise ConfigError(
            f"--changed-share needs a share above 0 and up to 1, with --delta, got {args.changed_share:g}"
        )
    if args.plot and len(args.train) > 1:
        raise ConfigError(f"--plot needs one layout, got {len(args.train)}")


def _run_slowed(args: argparse.Namespace) -> list[TwinReport]:
    """Measure the strategies that send boxes over links of given rates, and print their reports on rank 0."""
    _require_valid(args)
    rates = _rates(args)
    assert rates is not None
    reports: list[TwinReport] = []
    for train, gen in zip(args.train, args.gen, strict=True):
        _, scenario = _read(args, train, gen)
        _require_world(scenario)
        for name in BOXES:
            if name in args.skip or not {name, "all"} & set(args.strategies):
                continue
            try:
                reports.append(_measure_slowed(name, scenario, rates, args))
            except ConfigError as error:
                if args.strategies != ["all"]:
                    raise
                _report_left_out(name, scenario, error, args)
                continue
            reports[-1] = replace(reports[-1], train=train, gen=gen)
            if dist.get_rank() == 0 and args.json:
                print(json.dumps(asdict(reports[-1])), flush=True)
    if dist.get_rank() == 0 and not args.json:
        print_rows(twin.COLUMNS, twin.rows(reports), twin.NUM_TEXT_COLUMNS)
    return reports


def _measure_slowed(name: str, scenario: Scenario, rates: LinkRates, args: argparse.Namespace) -> TwinReport:
    """Measure a strategy over links of these rates; raises ConfigError if it does not support the sizes."""
    syncs = args.repeats or 1
    with shared_links(scenario.topology, rates) as links:
        contender = MegarlContender(name, scenario, args.hand_over, args.transport, links=links)
        report = measure(contender, scenario, syncs)
        contender.close()
        busiest = max(float(links.seconds("nvlink").max()), float(links.seconds("nic").max()))
    assert report.sync_seconds_p50 is not None
    assert report.cpu_seconds_p50 is not None
    measured = Measured(
        seconds=report.sync_seconds_p50,
        cpu_seconds=report.cpu_seconds_p50,
        busiest_link_seconds=busiest / (WARM_UP_SYNCS + syncs),
        mismatched_bytes=report.mismatched_bytes or 0,
    )
    return make_report(
        measured,
        time_sync(contender.arrangement, scenario, rates),
        seconds_bound(scenario.sources, contender.arrangement.needs, scenario.topology, rates),
        rates,
        strategy=name,
        model=args.model,
        train=scenario.train,
        gen=scenario.gen,
        topology=scenario.topology,
    )


def _run(args: argparse.Namespace) -> list[MeasuredReport]:
    _require_valid(args)
    requested = CONTENDERS if args.strategies == ["all"] else args.strategies
    names = [name for name in CONTENDERS if name in requested and name not in args.skip]
    if args.transport != "default":
        names = [name for name in names if name in POINT_TO_POINT]
    if args.delta is not None:
        names = [name for name in names if name in BOXES]
    reports = []
    for train, gen in zip(args.train, args.gen, strict=True):
        reports += _run_layout(args, names, *_read(args, train, gen))
    if dist.get_rank() == 0 and not args.json:
        print_table(reports)
    return reports


def _run_layout(
    args: argparse.Namespace, names: Sequence[str], model: ModelArchitecture, scenario: Scenario
) -> list[MeasuredReport]:
    _require_world(scenario)
    reports = []
    for name in names:
        try:
            contender = _contender(name, model, scenario, args)
        except ConfigError as error:
            if args.strategies != ["all"]:
                raise
            _report_left_out(name, scenario, error, args)
            continue
        report = measure(contender, scenario, max(args.repeats or REPEATS, MIN_SYNCS))
        contender.close()
        if dist.get_rank() == 0 and args.json:
            print(json.dumps(asdict(report)), flush=True)
        reports.append(report)
    if dist.get_rank() == 0 and args.plot:
        plot(reports, args.plot)
    return reports


def _require_world(scenario: Scenario) -> None:
    if scenario.grid.size != dist.get_world_size():
        raise ConfigError(f"--train takes {scenario.grid.size} ranks, torchrun started {dist.get_world_size()}")


def _report_left_out(name: str, scenario: Scenario, error: ConfigError, args: argparse.Namespace) -> None:
    if dist.get_rank() == 0:
        print(f"{scenario.train} -> {scenario.gen}: {name} left out: {error}", file=sys.stderr)
        if args.json:
            left_out = LeftOut(strategy=name, train=scenario.train, gen=scenario.gen, left_out=str(error))
            print(json.dumps(asdict(left_out)), flush=True)


def _contender(name: str, model: ModelArchitecture, scenario: Scenario, args: argparse.Namespace) -> Contender:
    if name not in (MEGATRON_CORE, NCCL_M2N):
        return MegarlContender(name, scenario, args.hand_over, args.transport, args.delta, args.changed_share)
    require_megatron_core_support(model, *megatron_grids(scenario))
    platform.prepare()
    from benchmarks.reshard.megatron_core import MegatronCore

    return MegatronCore(name, model, scenario, args.hand_over)


def _read(args: argparse.Namespace, train: str, gen: str) -> tuple[ModelArchitecture, Scenario]:
    make = partial(make_scenario, train=train, gen=gen, nodes=args.nodes, bucket_bytes=int(_bucket_mb(args) * 2**20))
    kind, _, size = args.model.partition(":")
    if kind in ("synthetic", "synthetic-moe"):
        synthetic = synthetic_model(float(size), is_moe=kind == "synthetic-moe")
        return synthetic, make(args.model, synthetic, "bfloat16", engine=partial(engine_layouts, synthetic))
    model, dtype = load_architecture_and_dtype(args.model)
    return model, make(model_name(args.model), model, dtype, engine=partial(_traced, args.model))


def _bucket_mb(args: argparse.Namespace) -> float:
    default = BUCKET_MB if args.network_mb_per_second is None else SLOWED_BUCKET_MB
    return float(args.bucket_mb or default)


def _traced(model: str, tp: int, dtype: str, *, ep: int = 1, dp: int = 1) -> Sequence[WeightLayout]:
    """Return SGLang's layouts of the model on GPUs, traced on rank 0 and broadcast."""
    out: list[Sequence[WeightLayout]] = [()]
    if dist.get_rank() == 0:
        from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts

        out = [trace_layouts(model, tp=tp, ep=ep, options={"attn_dp_size": dp}, device="cuda", dtype=dtype)]
    dist.broadcast_object_list(out)
    return out[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.reshard", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default=MODEL, help=f"a model folder, a config.json, synthetic:MB or synthetic-moe:MB ({MODEL})"
    )
    parser.add_argument("--train", default=[TRAIN], nargs="+", metavar=TRAIN, help="one or more layouts")
    parser.add_argument("--gen", default=[GEN], nargs="+", metavar=GEN, help="one for each of --train")
    parser.add_argument("--strategies", nargs="+", default=["all"], choices=["all", *CONTENDERS])
    parser.add_argument("--skip", nargs="+", default=[], choices=CONTENDERS, help="strategies to leave out")
    parser.add_argument(
        "--repeats",
        type=int,
        help=f"timed syncs after {WARM_UP_SYNCS} to warm up, at least {MIN_SYNCS} ({REPEATS}); with rates of links 1",
    )
    parser.add_argument(
        "--nodes",
        "--machines",
        type=int,
        default=1,
        help="machines to assume for traffic and rates of links; ranks are spread evenly",
    )
    parser.add_argument(
        "--bucket-mb", type=float, help=f"2**20 bytes ({BUCKET_MB}); with rates of links {SLOWED_BUCKET_MB}"
    )
    parser.add_argument(
        "--network-mb-per-second",
        type=float,
        metavar="RATE",
        help="rate of each rank's NIC, 10**6 bytes: messages take as long as over such links",
    )
    parser.add_argument(
        "--nvlink-mb-per-second", type=float, metavar="RATE", help="between a rank and those of its machine, likewise"
    )
    parser.add_argument(
        "--hand-over",
        choices=get_args(HandOver),
        default="direct",
        help="where the engines' parameters are, for all contenders: in the rank's process, or behind shared memory, "
        "as with SGLang",
    )
    parser.add_argument(
        "--transport",
        choices=get_args(TransportName),
        default="default",
        help="nccl-order: gloo with NCCL's rules, for the strategies that send messages; the others are left out",
    )
    parser.add_argument(
        "--delta",
        type=int,
        metavar="LAYERS",
        help="only so many last layers change from one sync to the next, and only what has changed is sent; for the "
        "strategies that send boxes; the others are left out",
    )
    parser.add_argument(
        "--changed-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of the elements of these layers, the share that changes: 0.011 as with a learning rate of 1e-6",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
