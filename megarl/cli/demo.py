"""`megarl demo`: fine-tune a tiny random model on this machine, then train it with GRPO."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from megarl.cli.options import add_overrides, console, file_path
from megarl.cli.train import print_results
from megarl.config import RunConfig, SftConfig, load_config

RECIPES = Path(__file__).parents[1] / "recipes"
"""The recipes of yaml/, which every installation of the package has."""

NUM_TRAIN, NUM_HELD_OUT = 6000, 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--sft`, `--train`, `--out`, `--seed`, `--data-only` and `--set`."""
    parser.add_argument(
        "--sft",
        type=file_path,
        default=RECIPES / "demo-sft.yaml",
        help="configuration of fine-tuning (yaml/demo-sft.yaml)",
    )
    parser.add_argument(
        "--train",
        type=file_path,
        default=RECIPES / "demo.yaml",
        help="configuration of GRPO (yaml/demo.yaml); --set overrides its keys",
    )
    parser.add_argument(
        "--out", type=file_path, default=Path("runs/demo"), help="output folder; an existing one is moved aside first"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data, fine-tuning and GRPO (0)")
    parser.add_argument("--data-only", action="store_true", help="only write the problems to OUT/data")
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Write the data, fine-tune, train with GRPO, and print the held-out accuracy before and after."""
    from megarl.controller.actor import Controller
    from megarl.controller.run_stage import rotate, run_stage
    from megarl.data.demo_arithmetic import write_arithmetic

    out, show = args.out, console()
    if out.exists():
        show.print(f"{out} exists; moved to {rotate(out)}", highlight=False)
    stage = "" if args.data_only else "1/3  "
    show.print(f"{stage}writing arithmetic problems to {out}/data", highlight=False)
    started = time.perf_counter()
    write_arithmetic(out / "data", seed=args.seed, num_train=NUM_TRAIN, num_heldout=NUM_HELD_OUT)
    if args.data_only:
        return 0
    made = time.perf_counter()
    data = [f"data.path={out}/data/sft.jsonl", f"model.path={out}/base", f"run_dir={out}/sft", f"seed={args.seed}"]
    sft = load_config(SftConfig, args.sft, [*data, f"export_dir={out}/sft/model"])
    show.print(f"2/3  a random Qwen3 model, supervised fine-tuning ({args.sft})", highlight=False, soft_wrap=True)
    run_stage(sft, Controller.sft)
    tuned = time.perf_counter()
    overrides = [f"data.path={out}/data/train.jsonl", f"data.eval_path={out}/data/heldout.jsonl"]
    overrides += [f"model.path={sft.export_path}", f"run_dir={out}", f"seed={args.seed}"]
    config = load_config(RunConfig, args.train, [*overrides, *args.overrides])
    show.print(f"3/3  GRPO ({args.train})", highlight=False, soft_wrap=True)
    run_stage(config, Controller.train)
    summary = _add_earlier_phases(out / "summary.json", made - started, tuned - made, time.perf_counter() - started)
    show.print(f"held-out accuracy {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}", highlight=False)
    print_results(config)
    return 0


def _add_earlier_phases(path: Path, data_seconds: float, sft_seconds: float, total: float) -> dict[str, Any]:
    """Add the time of the stages before GRPO to its summary file; return the summary."""
    summary: dict[str, Any] = json.loads(path.read_text())
    phases = {"make_data": data_seconds, "sft": sft_seconds, **summary["seconds_by_phase"]}
    summary |= {"seconds_total": total, "seconds_by_phase": phases}
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary
