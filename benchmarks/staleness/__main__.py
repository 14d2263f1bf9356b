"""Measures what training on samples of older policies costs in reward, with and without a correction.

python -m benchmarks.staleness --toy --json
python -m benchmarks.staleness --demo --model runs/demo/sft/model --data runs/demo/data
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.results_file import write_results
from benchmarks.staleness.demo import DemoReport, demo_paths, run_demo
from benchmarks.staleness.show import INTRODUCTIONS, markdown, print_table
from benchmarks.staleness.toy import STALENESS, Toy, ToyReport, run_toy
from megarl.errors import ConfigError, MegarlError


def main() -> int:
    """Print the reports to stdout and progress to stderr; return 1 if a target is missed."""
    args = _parser().parse_args()
    reports = list[ToyReport | DemoReport]()
    try:
        if min(args.staleness) < 0:
            raise ConfigError(f"--staleness needs at least 0, got {min(args.staleness)}")
        for report in _demo(args) if args.demo else _toy(args):
            reports.append(report)
            if args.json:
                print(json.dumps(asdict(report)), flush=True)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not args.json:
        print_table(reports)
    if args.write:
        write_results(args.write, INTRODUCTIONS[args.demo], markdown(reports), module="benchmarks.staleness")
    return 0 if all(report.reaches_target for report in reports) else 1


def _toy(args: argparse.Namespace) -> Iterator[ToyReport]:
    for name in ("seeds", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} needs at least 1, got {getattr(args, name)}")
    torch.set_num_threads(1)
    return run_toy(Toy(num_steps=args.steps, learning_rate=args.learning_rate), args.staleness, num_seeds=args.seeds)


def _demo(args: argparse.Namespace) -> Iterator[DemoReport]:
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    paths = demo_paths(folder, args.model, args.data, _notify)
    for corrected in {"default": (True,), "none": (False,), "both": (True, False)}[args.correction]:
        for staleness in args.staleness:
            if corrected or staleness:  # without staleness there is nothing to correct
                yield run_demo(folder, staleness, corrected=corrected, overrides=paths, notify=_notify)


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.staleness", description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--toy", action="store_true", help="train a policy of 32 weights, half a minute; the default")
    mode.add_argument("--demo", action="store_true", help="run yaml/demo.yaml asynchronously, minutes for each run")
    parser.add_argument(
        "--staleness", nargs="+", type=int, default=list(STALENESS), metavar="N", help="ages of samples in versions"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    toy = parser.add_argument_group("with --toy")
    toy.add_argument("--seeds", type=int, default=5, help="number of problems")
    toy.add_argument("--steps", type=int, default=150)
    toy.add_argument("--learning-rate", type=float, default=0.1, help="of Adam")
    demo = parser.add_argument_group("with --demo")
    demo.add_argument(
        "--folder", type=Path, default=Path("runs/staleness"), help="finished runs in it are not repeated"
    )
    demo.add_argument("--model", type=Path, help="fine-tuned model; default: the recipe's, or one that is made")
    demo.add_argument("--data", type=Path, help="folder of train.jsonl and heldout.jsonl; default: as for --model")
    demo.add_argument("--correction", choices=("default", "none", "both"), default="both")
    return parser


if __name__ == "__main__":
    sys.exit(main())
