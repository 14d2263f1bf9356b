"""`megarl replay RUN`: train again on the rollouts in a run's journal and compare the checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict

from megarl.cli.options import console, file_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN [--out FOLDER] [--json]`."""
    parser.add_argument("run_dir", type=file_path, metavar="RUN", help="folder of the run (its run_dir)")
    parser.add_argument("--out", type=file_path, metavar="FOLDER", help="folder for the replay; default: RUN/replay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Replay the run without engines; exit code 1 if a checkpoint differs from that of the run."""
    from megarl.controller.replay import replay_run  # imports Ray

    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # progress
        report = replay_run(args.run_dir.absolute(), (args.out or args.run_dir / "replay").absolute())
    if args.json:
        print(json.dumps({**asdict(report), "training_share": report.training_share}))
    else:
        for step, differing in report.checkpoints.items():
            what = f"{len(differing)} values differ, such as {differing[0]}" if differing else "bitwise equal"
            console().print(f"step {step}: {what}", highlight=False)
        if report.first_difference is not None:
            console().print(f"the first step whose training differs is {report.first_difference}", highlight=False)
        console().print(report.line, highlight=False)
    return 1 if any(report.checkpoints.values()) else 0
