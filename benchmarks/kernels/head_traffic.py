"""Computes what each step of a language head multiplies and moves, and the least time that this takes on a GPU.

python -m benchmarks.kernels.head_traffic --gpu h100-80 --write benchmarks/results/head-traffic.md

Nothing is run. Bytes of memory are those of operands that do not fit the cache; bytes from L2 are those that matrix
products read into tiles of 128 x 256, which the libraries of GPUs since Hopper share between pairs of multiprocessors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results_file import write_results
from benchmarks.text_table import markdown_rows, print_rows
from megarl.cluster.placement.hardware import GPU_TYPES, GpuType
from megarl.run.memory.training_memory import head_chunk_columns

TILE = (128, 256)
ELEMENT_BYTES, FLOAT32_BYTES = 2, 4

COLUMNS = ("head", "step", "TFLOP", "GB from L2", "GB of memory", "least ms")
INTRODUCTION = """\
# What a language head multiplies and moves

Computed for {gpu}, {tokens} tokens, hidden size {hidden} and {vocabulary} columns, in bfloat16. **Not measured**:
`least ms` is what the peak rates of the data sheet allow; large products reach about 80 % of them.

```
{command}
```

`fused` computes logits in chunks of {columns} columns, `fused, logits kept` where they fit half of the free memory;
`plain` (`trainer.fused_lm_head: false`) rounds them to bfloat16. `of roofline`: least time of three products, of logits
and two gradients, divided by the sum of the steps.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A matrix product of a head, or a pass over its logits."""

    head: str
    step: str
    flops: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    least_ms: float = 0.0


def head_steps(gpu: GpuType, tokens: int, hidden: int, vocabulary: int) -> Iterator[Step]:
    """Yield the steps of a forward and a backward pass of each kind of head, and their sums."""
    assert gpu.bytes_per_second is not None, gpu
    t, h, v = tokens, hidden, vocabulary
    columns = head_chunk_columns(t, v, FLOAT32_BYTES + ELEMENT_BYTES)
    product = 2 * t * h * v
    for head, size in (("fused", FLOAT32_BYTES), ("fused, logits kept", FLOAT32_BYTES), ("plain", ELEMENT_BYTES)):
        chunks = 1 if head == "plain" else -(-v // columns)
        states, weight = chunks * ELEMENT_BYTES * t * h, ELEMENT_BYTES * v * h
        logits, gradient = size * t * v, ELEMENT_BYTES * t * v
        sum_bytes = chunks * 2 * FLOAT32_BYTES * t * h if head != "plain" else ELEMENT_BYTES * t * h
        moved = [
            ("logits", product, _tile_bytes(t, v, h), states + weight + logits),
            ("statistics", 0, 0, logits),
            *([("logits again", product, _tile_bytes(t, v, h), states + weight + logits)] if head == "fused" else []),
            ("gradient of logits", 0, 0, logits + gradient),
            ("gradient of hidden states", product, _tile_bytes(t, h, v), gradient + weight + sum_bytes),
            ("gradient of weight", product, _tile_bytes(v, h, t), gradient + states + 2 * FLOAT32_BYTES * v * h),
        ]
        steps = [
            Step(
                head=head,
                step=name,
                flops=flops,
                l2_bytes=l2_bytes,
                memory_bytes=memory_bytes,
                least_ms=1e3 * max(flops / gpu.flops_per_second, memory_bytes / gpu.bytes_per_second),
            )
            for name, flops, l2_bytes, memory_bytes in moved
        ]
        yield from steps
        least_ms = sum(step.least_ms for step in steps)
        yield Step(
            head=head,
            step=f"sum, {3e5 * product / gpu.flops_per_second / least_ms:.0f} % of roofline",
            flops=sum(step.flops for step in steps),
            l2_bytes=sum(step.l2_bytes for step in steps),
            memory_bytes=sum(step.memory_bytes for step in steps),
            least_ms=least_ms,
        )


def _tile_bytes(rows: int, columns: int, depth: int) -> int:
    """Return the bytes of both operands that all tiles of a product [rows, columns] read."""
    tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
    return tiles * sum(TILE) * depth * ELEMENT_BYTES


def _row(step: Step) -> list[str]:
    sizes = (step.flops / 1e12, step.l2_bytes / 1e9, step.memory_bytes / 1e9)
    return [step.head, step.step, *(f"{size:.2f}" if size else "-" for size in sizes), f"{step.least_ms:.2f}"]


def main() -> int:
    """Print the table to stdout."""
    args = _parser().parse_args()
    gpu = next(gpu for gpu in GPU_TYPES if gpu.name == args.gpu)
    steps = list(head_steps(gpu, args.tokens, args.hidden, args.vocabulary))
    if args.json:
        for step in steps:
            print(json.dumps(asdict(step)))
    else:
        print_rows(COLUMNS, map(_row, steps), 2)
    if args.write:
        facts = {name: getattr(args, name) for name in ("gpu", "tokens", "hidden", "vocabulary")}
        columns = head_chunk_columns(args.tokens, args.vocabulary, FLOAT32_BYTES + ELEMENT_BYTES)
        table = markdown_rows(COLUMNS, map(_row, steps), 2)
        write_results(
            args.write, INTRODUCTION, table, module="benchmarks.kernels.head_traffic", columns=columns, **facts
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels.head_traffic", description=(__doc__ or "").splitlines()[0]
    )
    names = [gpu.name for gpu in GPU_TYPES if gpu.name and gpu.bytes_per_second]
    parser.add_argument("--gpu", choices=names, default="h100-80")
    parser.add_argument("--tokens", type=int, default=8192, help="number of scored tokens")
    parser.add_argument("--hidden", type=int, default=4096, help="size of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="size of the vocabulary")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
