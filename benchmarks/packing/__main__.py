"""Compares ways to pack sequences into micro-batches and to split them over ranks.

python -m benchmarks.packing --gsm8k path/to/gsm8k --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.packing.lengths import Gsm8k, Workload, made_up
from benchmarks.packing.measure import PACK_ALIGN, PackingReport, measure
from benchmarks.packing.schemes import SCHEMES
from benchmarks.packing.show import markdown, print_table
from benchmarks.results_file import write_results
from megarl.batch.balance import QWEN2_5_7B, SequenceCost
from megarl.errors import ConfigError, MegarlError

MODELS = {
    "qwen2.5-0.5b": SequenceCost(
        matmul_parameters=24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864) + 896 * 151936,
        attention_layers=24,
        attention_width=14 * (64 + 64),
    ),
    "qwen2.5-7b": QWEN2_5_7B,
}
"""Attention costs as much as the rest at 23,000 tokens in the small one, at 70,000 in the other."""

INTRODUCTION = """\
# Packing, scheme by scheme

Planned by one process on a machine with {cores} CPU cores:

```
{command}
```

{sequences} sequences a step on {ranks} data-parallel ranks, {seeds} seeds; nothing is trained. Costs are
floating-point operations by the model's sizes (PaLM, arXiv 2204.02311, appendix B), so "step cost" says how much
longer than a perfect split a step would take if all operations ran equally fast, and leaves out what a micro-batch
costs by itself. Each sequence is padded to a multiple of {align}, each micro-batch to one of {pack_align}. Numbers are
means over seeds; "fullest", "cost max/mean" and "worst" are the largest of any, "plan ms" is the median.

- `padded`: every sequence is padded to the batch's longest, as many rows to a micro-batch as the budget allows.
- `first_fit`: by token count in arrival order, packs dealt to ranks in turn: plain sequence packing.
- `karmarkar_karp`: largest differencing on token counts over ranks (equally many sequences each), then over each rank's
  micro-batches, as verl's `get_seqlen_balanced_partitions` does. It aims at the budget and does not keep it: see
  "fullest". `karmarkar_karp_cost` does the same on costs, as later versions of verl do for one fixed model.
- `megarl`: `megarl.batch.balance.plan_micro_batches`, on costs. Peers' schemes are written anew here.
- "at least": all tokens over ranks and budget, rounded up. "fill": tokens over the budgets of all micro-batches.
- "cost max/mean": over ranks. "step cost": in each micro-batch ranks wait for the costliest; 1 is perfect.
- Where one sequence costs more than what others make of a full budget, all ranks wait for it, in any scheme.
- `gsm8k`: questions with answers, a word, a digit or a mark for a token.

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
            module="benchmarks.packing",
            sequences=args.sequences,
            ranks=args.ranks,
            seeds=args.seeds,
            align=args.align,
            pack_align=PACK_ALIGN,
        )
    return 0


def _run(args: argparse.Namespace) -> Iterator[PackingReport]:
    for name in ("sequences", "ranks", "seeds", "align"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} needs at least 1, got {getattr(args, name)}")
    if args.sequences % args.ranks:
        raise ConfigError(
            f"--sequences needs a multiple of --ranks (largest differencing gives all ranks equally many), got "
            f"{args.sequences} % {args.ranks} = {args.sequences % args.ranks}"
        )
    gsm8k = Gsm8k(args.gsm8k) if args.gsm8k else None
    for model in args.models:
        for seed in range(args.seeds):
            for workload in _workloads(args, gsm8k, seed):
                for scheme in args.schemes:
                    report = measure(
                        scheme,
                        workload,
                        model=model,
                        cost=MODELS[model],
                        ranks=args.ranks,
                        align=args.align,
                        seed=seed,
                    )
                    if args.json:
                        print(json.dumps(asdict(report)), flush=True)
                    yield report


def _workloads(args: argparse.Namespace, gsm8k: Gsm8k | None, seed: int) -> Iterator[Workload]:
    workloads = [*made_up(args.sequences, seed), *([gsm8k.sample(args.sequences, seed)] if gsm8k else [])]
    for workload in workloads:
        yield replace(workload, max_tokens=args.max_tokens) if args.max_tokens else workload


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.packing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1000, help="in a step")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel")
    parser.add_argument("--max-tokens", type=int, help="of a micro-batch; default: 16384, for GSM8K 4096")
    parser.add_argument("--align", type=int, default=1, help="pad each sequence to a multiple, as 2 * cp asks for")
    parser.add_argument("--seeds", type=int, default=5, help="batches of each kind")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="whose sizes give the costs")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER", help="adds its lengths; holds train.jsonl")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
