"""Times vectorised algorithms against loops over tokens.

python -m benchmarks.kernels --tokens 1000000 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.kernels.measure import LOOPS, KernelReport, measure
from benchmarks.kernels.show import markdown, print_table
from benchmarks.kernels.workload import made_up
from benchmarks.results_file import write_results
from megarl.errors import ConfigError, MegarlError

INTRODUCTION = """\
# Vectorised algorithms against loops over tokens

By one process with {threads} PyTorch thread(s) on a machine with {cores} CPU cores:

```
{command}
```

Kernel and loop run turn about on the same float32 tensors, {pairs} times each, and return the same ("largest
difference" is relative to the largest result). Times are medians; "x loop" is the median over pairs of the loop's time
over the kernel's, "worst" the smallest.

- `tensors`: the loop as the formula reads, an element at a time. `lists`: the same over Python numbers, conversion from
  and to tensors included: far faster, and the stricter comparison.
- `whole`: all tokens count. `holes`: every third turn of 128 tokens is a tool's and does not. `lambdas`: each sequence
  has its own.
- Lengths are lognormal, with one sequence of 32,768 tokens where there are as many.

"""


def main() -> int:
    """Reports on stdout."""
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
            module="benchmarks.kernels",
            threads=torch.get_num_threads(),
            pairs=args.pairs,
        )
    return 0


def _run(args: argparse.Namespace) -> Iterator[KernelReport]:
    for name in ("tokens", "pairs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} needs at least 1, got {getattr(args, name)}")
    for workload in made_up(args.tokens, args.seed):
        for loop in args.loops:
            report = measure(workload, loop=loop, pairs=args.pairs)
            if args.json:
                print(json.dumps(asdict(report)), flush=True)
            yield report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the pack")
    parser.add_argument("--pairs", type=int, default=5, help="how often both run")
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=LOOPS, help="what the loop goes over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
