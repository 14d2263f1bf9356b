"""Measures the time from `megarl train` to the first completion, in new processes each time.

python -m benchmarks.startup --config yaml/demo.yaml --runs 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.chaos.command import Command
from benchmarks.chaos.prepare import prepare_demo
from benchmarks.results_file import write_results
from benchmarks.startup.measure import Start, StartupReport, imports_of, measure_start, median_start
from benchmarks.startup.show import markdown
from megarl.cli.options import add_overrides
from megarl.config import RunConfig, load_config
from megarl.errors import ConfigError, MegarlError

TIMEOUT_SECONDS = 600.0

INTRODUCTION = """\
# From the command to the first completion

Measured on a node with {cores} CPU cores:

```
{command}
```

Every start is a new Ray cluster with new processes. An instant in which several processes work counts as imports if any
of them imports modules, otherwise as Ray, SGLang or megarl, in this order.

"""


def main(argv: list[str] | None = None) -> int:
    """Print the report to stdout, as a table or as one JSON object, and progress to stderr."""
    args = _parser().parse_args(argv)
    try:
        report = _run(args, lambda text: print(text, file=sys.stderr, flush=True))
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(asdict(report)) if args.json else markdown(report))
    if args.write is not None:
        write_results(args.write, INTRODUCTION, markdown(report), module="benchmarks.startup")
    return 0


def _run(args: argparse.Namespace, notify: Callable[[str], None]) -> StartupReport:
    if args.runs < 1:
        raise ConfigError(f"--runs needs at least 1, got {args.runs}")
    config = load_config(RunConfig, args.config, args.overrides)
    with tempfile.TemporaryDirectory(prefix="megarl-startup-") as folder:
        overrides = [*args.overrides, *prepare_demo(config, Path(folder) / "demo", notify)]
        runs: list[Start] = []
        for number in range(args.runs):
            start, _ = _start_once(args.config, overrides, Path(folder) / f"run-{number}", with_imports=False)
            notify(f"start {number + 1}/{args.runs}: {start.seconds:.1f} s")
            runs.append(start)
        imports: dict[str, dict[str, float]] = {}
        if args.imports:
            _, imports = _start_once(args.config, overrides, Path(folder) / "run-imports", with_imports=True)
    return StartupReport(config=str(args.config), runs=tuple(runs), median=median_start(runs), imports=imports)


def _start_once(
    config: Path, overrides: list[str], run_dir: Path, *, with_imports: bool
) -> tuple[Start, dict[str, dict[str, float]]]:
    log = run_dir.with_suffix(".log")
    command = Command(["train", str(config), "--set", *overrides, f"run_dir={run_dir}", "export_dir=null"], log)
    if with_imports:
        os.environ["PYTHONPROFILEIMPORTTIME"] = "1"
    try:
        start = measure_start(command, run_dir, timeout=TIMEOUT_SECONDS)
        return start, imports_of(command, log) if with_imports else {}
    finally:
        os.environ.pop("PYTHONPROFILEIMPORTTIME", None)
        command.end()
        command.remove_temporary()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="configuration of `megarl train`")
    parser.add_argument("--runs", type=int, default=5, help="number of starts, of which the median is reported")
    parser.add_argument("--imports", action="store_true", help="start once more and record what each process imports")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the tables to this file")
    add_overrides(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
