"""Compares megarl's ops with PyTorch, torch.compile and Liger: results, bytes, and on a GPU times and the roofline.

python -m benchmarks.kernels --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.kernels import sizes
from benchmarks.kernels.cases import make_cases
from benchmarks.kernels.measure import KernelReport, measure
from benchmarks.kernels.rooflines import find_roofline
from benchmarks.kernels.show import markdown, print_table
from benchmarks.results_file import write_results

INTRODUCTION = """\
# Ops of megarl_kernels compared with PyTorch

Measured on {device}, torch {torch}:

```
{command}
```

- `megarl (reference)` is the op's PyTorch reference, which runs on CPUs; `megarl (triton)` its Triton kernel, on a GPU.
  `torch` is the computation as usually written.
- `least MB`: inputs and outputs of the op, once each. `counted MB`: bytes of all tensors that PyTorch operations read
  and wrote, including intermediate ones; it is not known for Triton kernels, torch.compile and Liger.
- `peak MB`: most memory that a run had allocated, results included.
- `ms` and `of roofline` (least time for `least MB` and `GFLOP` at the GPU's peak rates, divided by the time) are for
  GPUs only. A CPU runs small, odd sizes: the table shows that results agree and what is moved, and no speed.
- `largest difference`: from `torch`, relative to the largest magnitude of each result.

"""


def main() -> int:
    """Print the reports to stdout."""
    args = _parser().parse_args()
    try:
        reports = list(_run(args))
    except ArithmeticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not args.json:
        print_table(reports)
    if args.write:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
        write_results(
            args.write,
            INTRODUCTION,
            markdown(reports),
            module="benchmarks.kernels",
            device=device,
            torch=torch.__version__,
        )
    return 0


def _run(args: argparse.Namespace) -> Iterator[KernelReport]:
    chosen = sizes.GPU if args.device == "cuda" else sizes.CPU
    given = {name: getattr(args, name) for name in ("tokens", "hidden", "vocabulary") if getattr(args, name)}
    roofline = find_roofline(args.device)
    for case in make_cases(replace(chosen, **given), args.device, compiled=args.compile):
        if args.ops and case.op.partition(",")[0] not in args.ops:
            continue
        for report in measure(case, args.device, roofline):
            if args.json:
                print(json.dumps(asdict(report)), flush=True)
            yield report


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--ops", nargs="+", help="names of ops; all by default")
    parser.add_argument("--tokens", type=int, help="tokens of the ops for log-probabilities")
    parser.add_argument("--hidden", type=int, help="hidden size")
    parser.add_argument("--vocabulary", type=int, help="size of the vocabulary")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=cuda, help="also measure torch.compile"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
