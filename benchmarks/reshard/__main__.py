"""Compares weight-sync strategies on real ranks.

torchrun --nproc-per-node 8 -m benchmarks.reshard --model synthetic:64 --train tp=4,dp=2 --gen tp=2 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from benchmarks.reshard.contender import (
    EXACT_CONSECUTIVE,
    GATHER_SERIAL,
    Contender,
    HandOver,
    MegarlContender,
    TransportName,
)
from benchmarks.reshard.measure import WARM_UP_SYNCS, measure
from benchmarks.reshard.megatron_limits import megatron_grids, require_megatron_core_support
from benchmarks.reshard.show import MEGATRON_CORE, NCCL_M2N, LeftOut, plot, print_table
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from megarl.cli.tools.reshard_explain import make_scenario, model_name
from megarl.cluster.placement.network import use_network_to_master
from megarl.errors import ConfigError, MegarlError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.runtime import platform
from megarl.reshard.analysis.scenario import Scenario
from megarl.reshard.analysis.sync_report import SyncReport
from megarl.reshard.layout.layout import WeightLayout

CONTENDERS = (
    "ds_chat",
    "hybridflow_v",
    GATHER_SERIAL,
    "gather_hf",
    MEGATRON_CORE,
    NCCL_M2N,
    EXACT_CONSECUTIVE,
    "exact",
    "micro_dp",
)
"""Names of all contenders, in the order in which reports list them."""

POINT_TO_POINT = ("ds_chat", "hybridflow_v", EXACT_CONSECUTIVE, "exact", "micro_dp")
"""Strategies that use a transport."""

BOXES = (EXACT_CONSECUTIVE, "exact", "micro_dp")
"""Strategies that can leave out what has not changed."""

MIN_SYNCS = 3
"""With three syncs, an error that appears only after the first sync has two chances to appear."""


def main() -> int:
    """Measure each strategy and print a report on rank 0; return the exit code."""
    args = _parser().parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
    if platform.is_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://"))
    use_network_to_master(store, rank, size)
    dist.init_process_group(platform.backend(), store=store, rank=rank, world_size=size)
    try:
        reports = _run(args)
    except MegarlError as error:
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 1 if any(report.mismatched_bytes for report in reports) else 0


def _run(args: argparse.Namespace) -> list[SyncReport]:
    if len(args.train) != len(args.gen):
        raise ConfigError(f"--gen needs as many layouts as --train, got {len(args.gen)} and {len(args.train)}")
    if args.plot and len(args.train) > 1:
        raise ConfigError(f"--plot needs one layout, got {len(args.train)}")
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
) -> list[SyncReport]:
    if scenario.grid.size != dist.get_world_size():
        raise ConfigError(f"--train takes {scenario.grid.size} ranks, torchrun started {dist.get_world_size()}")
    reports = []
    for name in names:
        try:
            contender = _contender(name, model, scenario, args)
        except ConfigError as error:
            if args.strategies != ["all"]:
                raise
            if dist.get_rank() == 0:
                print(f"{scenario.train} -> {scenario.gen}: {name} left out: {error}", file=sys.stderr)
            if dist.get_rank() == 0 and args.json:
                left_out = LeftOut(strategy=name, train=scenario.train, gen=scenario.gen, left_out=str(error))
                print(json.dumps(asdict(left_out)), flush=True)
            continue
        report = measure(contender, scenario, max(args.repeats, MIN_SYNCS))
        contender.close()
        if dist.get_rank() == 0 and args.json:
            print(json.dumps(asdict(report)), flush=True)
        reports.append(report)
    if dist.get_rank() == 0 and args.plot:
        plot(reports, args.plot)
    return reports


def _contender(name: str, model: ModelArchitecture, scenario: Scenario, args: argparse.Namespace) -> Contender:
    if name not in (MEGATRON_CORE, NCCL_M2N):
        return MegarlContender(name, scenario, args.hand_over, args.transport, args.delta)
    require_megatron_core_support(model, *megatron_grids(scenario))
    platform.prepare()
    from benchmarks.reshard.megatron_core import MegatronCore

    return MegatronCore(name, model, scenario, args.hand_over)


def _read(args: argparse.Namespace, train: str, gen: str) -> tuple[ModelArchitecture, Scenario]:
    make = partial(make_scenario, train=train, gen=gen, nodes=args.nodes, bucket_bytes=int(args.bucket_mb * 2**20))
    kind, _, size = args.model.partition(":")
    if kind in ("synthetic", "synthetic-moe"):
        synthetic = synthetic_model(float(size), is_moe=kind == "synthetic-moe")
        return synthetic, make(args.model, synthetic, "bfloat16", engine=partial(engine_layouts, synthetic))
    model, dtype = load_architecture_and_dtype(args.model)
    return model, make(model_name(args.model), model, dtype, engine=partial(_traced, args.model))


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
        "--model", required=True, help="a model folder, a config.json, synthetic:MB or synthetic-moe:MB"
    )
    parser.add_argument("--train", required=True, nargs="+", metavar="pp=1,tp=4,dp=2", help="one or more layouts")
    parser.add_argument("--gen", required=True, nargs="+", metavar="pp=1,tp=2", help="one for each of --train")
    parser.add_argument("--strategies", nargs="+", default=["all"], choices=["all", *CONTENDERS])
    parser.add_argument("--skip", nargs="+", default=[], choices=CONTENDERS, help="strategies to leave out")
    parser.add_argument(
        "--repeats", type=int, default=5, help=f"timed syncs after {WARM_UP_SYNCS} to warm up, at least {MIN_SYNCS}"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes to assume when counting traffic; ranks are spread evenly"
    )
    parser.add_argument("--bucket-mb", type=float, default=32, help="2**20 bytes")
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
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
