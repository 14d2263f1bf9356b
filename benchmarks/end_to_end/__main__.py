"""Compares the time of a GRPO step with that of TRL's GRPOTrainer: same model, prompts, completions and updates.

python -m benchmarks.end_to_end --peer trl --json

Both use all cores, TRL with its fastest batch size. Runs alternate. Once, TRL is installed from the package index in an
environment of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.end_to_end.compare import WorkloadReport, compare, fastest
from benchmarks.end_to_end.megarl_run import run_megarl
from benchmarks.end_to_end.show import COLUMNS, PHASE_COLUMNS, PROCESS_COLUMNS, phase_rows, process_rows, rows
from benchmarks.end_to_end.trl_environment import make_trl_environment
from benchmarks.end_to_end.trl_run import BATCH_SIZES, run_trl
from benchmarks.end_to_end.workloads import WORKLOADS
from benchmarks.results_file import write_results
from benchmarks.text_table import markdown_rows, print_rows
from megarl.cli.options import add_overrides
from megarl.errors import ConfigError, MegarlError

ENVIRONMENT = Path("runs/peers/trl")

CALIBRATION_STEPS = 3
"""Counted steps of the runs that find TRL's fastest batch size."""

INTRODUCTION = """\
# Time of a GRPO step, compared with TRL

Measured on a CPU with {cores} cores:

```
{command}
```

256 completions and two updates a step, the same model and prompts, {runs} alternating runs of each trainer; the time of
a run is the median of its steps, and the table has medians over runs. `min` and `max` are the ratios of pairs of runs.
Both trainers compute in float32 on all cores. TRL generates with transformers, and has the fastest of the batch sizes
{batch_sizes}.

"""


def main(argv: list[str] | None = None) -> int:
    """Print the report to stdout, as a table or as one JSON object, and progress to stderr."""
    args = _parser().parse_args(argv)
    try:
        reports = _run(args, lambda text: print(text, file=sys.stderr, flush=True))
    except (MegarlError, ArithmeticError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, MegarlError) else 1
    if args.json:
        ratios = {f"ratio_{name}": report.ratio for name, report in reports.items()}
        details = {name: asdict(report) for name, report in reports.items()}
        print(json.dumps({"peer": args.peer, "runs": args.runs, **ratios, **details}))
    else:
        print_rows(COLUMNS, rows(reports), 1)
        print()
        print_rows(PHASE_COLUMNS, phase_rows(reports), 2)
        print()
        print_rows(PROCESS_COLUMNS, process_rows(reports), 2)
    if args.write is not None:
        table = markdown_rows(COLUMNS, rows(reports), 1) + "\nA step of megarl by phase:\n\n"
        table += markdown_rows(PHASE_COLUMNS, phase_rows(reports), 2)
        table += "\nCPU time of a step by kind of process; a scheduler is where an engine computes:\n\n"
        table += markdown_rows(PROCESS_COLUMNS, process_rows(reports), 2)
        sizes = ", ".join(map(str, BATCH_SIZES))
        facts = {"runs": args.runs, "batch_sizes": sizes}
        write_results(args.write, INTRODUCTION, table, module="benchmarks.end_to_end", **facts)
    return 0


def _run(args: argparse.Namespace, notify: Callable[[str], None]) -> dict[str, WorkloadReport]:
    if args.runs < 1:
        raise ConfigError(f"--runs needs at least 1, got {args.runs}")
    python = make_trl_environment(args.environment.absolute(), notify)
    with tempfile.TemporaryDirectory(prefix="megarl-end-to-end-") as temporary:
        folder = Path(temporary)
        return {name: _compare_on(name, python, folder / name, args, notify) for name in args.workloads}


def _compare_on(
    name: str, python: Path, folder: Path, args: argparse.Namespace, notify: Callable[[str], None]
) -> WorkloadReport:
    workload = WORKLOADS[name](folder / "workload", notify)

    def seconds(batch_size: int) -> float:
        run = run_trl(
            python, workload, folder / f"trl-batch-{batch_size}", batch_size=batch_size, num_steps=CALIBRATION_STEPS
        )
        notify(f"{name}: TRL with batches of {batch_size}: {median(run.seconds):.2f} s a step")
        return median(run.seconds)

    batch_size = fastest(BATCH_SIZES, seconds)
    return compare(
        lambda number: run_megarl(workload, folder / f"megarl-{number}", args.overrides),
        lambda number: run_trl(python, workload, folder / f"trl-{number}", batch_size=batch_size),
        args.runs,
        batch_size=batch_size,
        notify=lambda text: notify(f"{name}: {text}"),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.end_to_end", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", choices=("trl",), default="trl", help="the other trainer")
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument("--runs", type=int, default=5, help="number of runs of each trainer")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="folder in which the peer is installed")
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the tables to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
