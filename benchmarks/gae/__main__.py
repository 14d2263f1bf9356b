"""Compares the speed of the vectorized generalized advantage estimation with loops.

python -m benchmarks.gae --tokens 1000000 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gae.measure import LOOPS, KernelReport, measure
from benchmarks.gae.show import markdown, print_table
from benchmarks.gae.workload import make_kernel_workloads
from benchmarks.results_file import write_results
from megarl.errors import ConfigError, MegarlError

INTRODUCTION = """\
# Vectorized generalized advantage estimation compared with loops

Measured in one process with {threads} PyTorch thread(s) on a node with {cores} CPU cores:

```
{command}
```

Kernel and loop run alternately on the same float32 tensors, {pairs} times each, and their results agree ("largest
difference" is relative to the largest result). Times are medians; "x loop" is the median over pairs of the loop's time
divided by the kernel's, "worst" the smallest such ratio.

- `tensors`: the loop follows the formula, one tensor element at a time. `lists`: the same on Python numbers, including
  the conversion from and to tensors. `positions`: on a padded batch, one position of all sequences at a time; padding
  the batch is not counted.
- `whole`: all tokens are in the loss mask. `holes`: every third turn of 128 tokens is a tool response and is masked.
  `lambdas`: each sequence has its own lambda.
- Lengths are lognormal, with one sequence of 32,768 tokens if the workload has that many.

"""


def main() -> int:
    """Print the reports to stdout."""
    args = _parser().parse_args()
    try:
        reports = list(_run(args))
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not args.json:
        print_table(reports)
    if args.write:
        write_results(
            args.write,
            INTRODUCTION,
            markdown(reports),
            module="benchmarks.gae",
            threads=torch.get_num_threads(),
            pairs=args.pairs,
        )
    return 0


def _run(args: argparse.Namespace) -> Iterator[KernelReport]:
    for name in ("tokens", "pairs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} needs at least 1, got {getattr(args, name)}")
    for workload in make_kernel_workloads(args.tokens, args.seed):
        for loop in args.loops:
            report = measure(workload, loop=loop, pairs=args.pairs)
            if args.json:
                print(json.dumps(asdict(report)), flush=True)
            yield report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gae", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="number of packed tokens")
    parser.add_argument("--pairs", type=int, default=5, help="number of runs of kernel and loop")
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=LOOPS, help="what the loops iterate over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
