"""Compares algorithms that pack sequences into micro-batches and split them over ranks.

python -m benchmarks.packing --gsm8k path/to/gsm8k --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.packing.lengths import Gsm8k, PackingWorkload, make_packing_workloads
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
"""Attention costs as much as the matrix products at 23,000 tokens in the small model, at 70,000 in the large one."""

INTRODUCTION = """\
# Comparison of packing schemes

Planned in one process on a node with {cores} CPU cores:

```
{command}
```

{sequences} sequences per step on {ranks} data-parallel ranks, {seeds} seeds; nothing is trained. Costs are
floating-point operations from the model's sizes (PaLM, arXiv 2204.02311, appendix B). "step cost" is therefore the
duration of a step relative to a perfect split if all operations ran equally fast, without the fixed overhead of a
micro-batch. Sequences are padded to a multiple of {align}, micro-batches to a multiple of {pack_align}. Numbers are
means over seeds; "fullest", "cost max/mean" and "worst" are maxima, "plan ms" is the median.

- `padded`: every sequence is padded to the longest of the batch; a micro-batch has as many rows as the budget allows.
- `first_fit`: plain sequence packing by token count in arrival order; packs are assigned to ranks round-robin.
- `karmarkar_karp`: largest differencing on token counts over ranks (equally many sequences each), then over each rank's
  micro-batches, like verl's `get_seqlen_balanced_partitions`. It targets the budget but may exceed it: see "fullest".
  `karmarkar_karp_cost` does the same on costs, as later versions of verl do for one fixed model.
- `megarl`: `megarl.batch.balance.plan_micro_batches`, on costs. The other schemes are reimplemented here.
- "at least": total tokens divided by ranks times budget, rounded up. "fill": tokens over all budgets.
- "cost max/mean": over ranks; the duration of a step in which data-parallel ranks wait for each other once per update,
  as those of dense models do. "step cost": with expert parallelism, all ranks wait in each micro-batch for the most
  expensive one. 1 is optimal in both.
- If one sequence costs more than a full budget of shorter ones, all ranks wait for it in any scheme.
- `gsm8k`: questions with answers; every word, digit and punctuation mark counts as one token.

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
            f"--sequences needs a multiple of --ranks (Karmarkar-Karp gives every rank equally many sequences), got "
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


def _workloads(args: argparse.Namespace, gsm8k: Gsm8k | None, seed: int) -> Iterator[PackingWorkload]:
    workloads = [
        *make_packing_workloads(args.sequences, seed),
        *([gsm8k.sample(args.sequences, seed)] if gsm8k else []),
    ]
    for workload in workloads:
        yield replace(workload, max_tokens=args.max_tokens) if args.max_tokens else workload


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.packing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1000, help="in a step")
    parser.add_argument("--ranks", type=int, default=8, help="number of data-parallel ranks")
    parser.add_argument("--max-tokens", type=int, help="token budget of a micro-batch; default: 16384, for GSM8K 4096")
    parser.add_argument("--align", type=int, default=1, help="pad each sequence to a multiple, such as 2 * cp")
    parser.add_argument("--seeds", type=int, default=5, help="number of batches of each kind")
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, help="models whose sizes give the costs"
    )
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument(
        "--gsm8k", type=Path, metavar="FOLDER", help="folder with GSM8K's train.jsonl; adds its lengths"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
