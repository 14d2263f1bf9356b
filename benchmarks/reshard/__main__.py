"""Compares strategies on real ranks.

torchrun --nproc-per-node 8 -m benchmarks.reshard --model synthetic:64 --train tp=4,dp=2 --gen tp=2 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.reshard.measure import measure
from benchmarks.reshard.show import plot, print_table
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from megarl.controller.resharding import make_scenario, model_name, read_model
from megarl.errors import ConfigError, MegarlError
from megarl.reshard.layout import WeightLayout
from megarl.reshard.report import SyncReport
from megarl.reshard.scenario import STRATEGIES, Scenario

LEAST_SYNCS = 3
"""An error that only a second sync shows has two to show in."""


def main() -> int:
    """One report per strategy, printed by rank 0."""
    args = _parser().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
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
    scenario = _scenario(args)
    if scenario.grid.size != dist.get_world_size():
        raise ConfigError(f"--train takes {scenario.grid.size} ranks, torchrun started {dist.get_world_size()}")
    reports = []
    for name in STRATEGIES if args.strategies == ["all"] else args.strategies:
        try:
            report = measure(name, scenario, max(args.repeats, LEAST_SYNCS))
        except ConfigError as error:
            if args.strategies != ["all"]:
                raise
            if dist.get_rank() == 0:
                print(f"{name} left out: {error}", file=sys.stderr)
            continue
        reports.append(report)
        if dist.get_rank() == 0 and args.json:
            print(json.dumps(asdict(report)), flush=True)
    if dist.get_rank() == 0:
        if not args.json:
            print_table(reports)
        if args.plot:
            plot(reports, args.plot)
    return reports


def _scenario(args: argparse.Namespace) -> Scenario:
    make = partial(
        make_scenario, train=args.train, gen=args.gen, nodes=args.nodes, bucket_bytes=int(args.bucket_mb * 2**20)
    )
    kind, _, size = args.model.partition(":")
    if kind == "synthetic":
        model = synthetic_model(float(size))
        return make(args.model, model, "bfloat16", engine=partial(engine_layouts, model))
    model, dtype = read_model(args.model)
    return make(model_name(args.model), model, dtype, engine=partial(_traced, args.model))


def _traced(model: str, tp: int, dtype: str) -> Sequence[WeightLayout]:
    """Traced by rank 0, for all."""
    out: list[Sequence[WeightLayout]] = [()]
    if dist.get_rank() == 0:
        from megarl.rollout.trace import trace_layouts

        out = [trace_layouts(model, tp=tp, dtype=dtype)]
    dist.broadcast_object_list(out)
    return out[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.reshard", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a model folder, a config.json, or synthetic:MB")
    parser.add_argument("--train", required=True, metavar="pp=1,tp=4,dp=2")
    parser.add_argument("--gen", required=True, metavar="pp=1,tp=2")
    parser.add_argument("--strategies", nargs="+", default=["all"], choices=["all", *STRATEGIES])
    parser.add_argument("--repeats", type=int, default=5, help=f"syncs, at least {LEAST_SYNCS}")
    parser.add_argument("--nodes", type=int, default=1, help="machines to count for; ranks are spread evenly")
    parser.add_argument("--bucket-mb", type=float, default=256)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
