"""Compares asynchronous with synchronous steps of an agent whose tool makes it wait: steps per second and reward.

python -m benchmarks.async_agents --json
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.async_agents.compare import Comparison
from benchmarks.async_agents.run import LAST_STEPS, SCHEDULES, ScheduleReport, Setup, prepare_model, run_schedule
from benchmarks.async_agents.show import INTRODUCTION, markdown, print_table
from benchmarks.results_file import write_results
from megarl.errors import ConfigError, MegarlError


def main(argv: list[str] | None = None) -> int:
    """Print the comparison to stdout and progress to stderr; return 1 if a target is missed."""
    args = _parser().parse_args(argv)
    try:
        setup = _setup(args)
        comparison = _run(args.folder.absolute(), setup, lambda text: print(text, file=sys.stderr, flush=True))
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        ratios = {"ratio": comparison.ratio, "reward_difference": comparison.reward_difference}
        print(
            json.dumps({**ratios, **asdict(setup), "runs": [asdict(comparison.sync), asdict(comparison.asynchronous)]})
        )
    else:
        print_table(comparison)
    if args.write is not None:
        facts = {**asdict(setup), "last_steps": LAST_STEPS}
        write_results(args.write, INTRODUCTION, markdown(comparison), module="benchmarks.async_agents", **facts)
    return 0 if comparison.reaches_target else 1


def _run(folder: Path, setup: Setup, notify: Callable[[str], None]) -> Comparison:
    prepare_model(folder, notify)
    found: dict[str, ScheduleReport] = {}
    for schedule in SCHEDULES:
        shutil.rmtree(folder / schedule, ignore_errors=True)
        notify(f"{schedule}: {setup.steps} steps")
        found[schedule] = run_schedule(folder, schedule, setup)
    return Comparison(sync=found["sync"], asynchronous=found["async"])


def _setup(args: argparse.Namespace) -> Setup:
    for name in ("steps", "prompts_per_step", "group_size", "eval_samples"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} needs at least 1, got {getattr(args, name)}")
    for name in ("latency_seconds", "latency_sigma"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} needs to be above 0, got {getattr(args, name):g}")
    return Setup(**{field.name: getattr(args, field.name) for field in fields(Setup)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.async_agents", description=(__doc__ or "").splitlines()[0])
    default = Setup()
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/async-agents"), help="the model in it is not made again"
    )
    for name in ("steps", "prompts_per_step", "group_size", "lookahead", "eval_samples", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    for name, text in (
        ("learning_rate", "of Adam"),
        ("latency_seconds", "mean latency of a call of the tool"),
        ("latency_sigma", "standard deviation of the logarithm of the latency"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(default, name), help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
