"""Measures the difference between the log-probabilities of trainer and engine without a defect, on the CPU.

python -m benchmarks.mismatch --folder /tmp/mismatch --gsm8k path/to/gsm8k --write benchmarks/results/bf16-mismatch.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.mismatch.families import FAMILIES, REPLAYED, run_family
from benchmarks.mismatch.measure import MismatchReport
from benchmarks.mismatch.prepare import prepare_folder, run_recipe
from benchmarks.mismatch.recipes import RECIPES
from benchmarks.mismatch.show import INTRODUCTION, markdown, print_tables
from benchmarks.results_file import write_results
from megarl.errors import MegarlError


def main() -> int:
    """Print one table of recipes and one of model families."""
    args = _parser().parse_args()
    try:
        recipes, families = _run(args, args.folder.resolve())
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print("\n".join(json.dumps(asdict(report)) for report in (*recipes, *families)))
    else:
        print_tables(recipes, families)
    if args.write:
        write_results(
            args.write, INTRODUCTION, markdown(recipes, families), module="benchmarks.mismatch", dtype=args.dtype
        )
    return 0


def _run(args: argparse.Namespace, folder: Path) -> tuple[list[MismatchReport], list[MismatchReport]]:
    prepare_folder(folder, gsm8k=args.gsm8k, real_model=args.real_model, openai_agents=args.openai_agents)
    recipes = [recipe for recipe in RECIPES if not recipe.needs or getattr(args, recipe.needs) is not None]

    def chosen(name: str) -> bool:
        return args.only is None or any(part in name for part in args.only)

    return (
        [
            _measure_once(folder, recipe.file, partial(run_recipe, recipe, dtype=args.dtype, folder=folder))
            for recipe in recipes
            if chosen(recipe.file)
        ],
        [
            _measure_once(folder, name, partial(run_family, name, dtype=args.dtype, folder=folder))
            for name in (*FAMILIES, *REPLAYED)
            if chosen(name)
        ],
    )


def _measure_once(folder: Path, name: str, measure: Callable[[], MismatchReport]) -> MismatchReport:
    """Return the report of an earlier call of the program with the same folder, or make it."""
    file = folder / "reports" / f"{name.replace('/', '-')}.json"
    if not file.exists():
        print(name, file=sys.stderr, flush=True)
        measure().write(file)
    return MismatchReport.read(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.mismatch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the runs; what it has already is not run again"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", nargs="+", metavar="PART", help="recipes and families whose names have such a part")
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER", help="GSM8K's train.jsonl and test.jsonl")
    parser.add_argument(
        "--real-model", type=Path, metavar="FOLDER", help="what examples/real-model/make_model.py writes"
    )
    parser.add_argument(
        "--openai-agents", type=Path, metavar="FOLDER", help="environment that examples/gateway/README.md installs"
    )
    parser.add_argument(
        "--http-api", action="store_const", const=True, help="examples/environments/api.py serves the facts of FOLDER"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the tables to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
