"""Measures how many weights, and how many pieces of them, an optimizer step changes in the dtype that engines hold.

Simulated Adam on float32 weights from a normal distribution, with normal gradients; after the warm-up of its moments,
one step is compared in the engines' dtype, bit by bit. Gradients of all weights are there, as in a dense model.

    python -m benchmarks.reshard.changed_weights --lr 1e-6 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.text_table import print_rows

PIECES = (64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
"""Sizes of pieces in bytes."""

INDEX_BYTES = 4
"""Of an index in a list of changed elements."""

BETAS, EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedWeights:
    """What one step has changed; one JSON object."""

    lr: float
    step: int
    """Number of the step; the moments of Adam are those of all steps until then."""
    dtype: str
    changed_elements: float
    """Share of the elements that differ."""
    changed_pieces: dict[int, float]
    """By size of a piece in bytes, the share of pieces with an element that differs."""
    indexed_bytes: float
    """Bytes of a list of indices and values of changed elements, as a share of all elements' bytes."""


def measure(lr: float, steps: int, dtype: torch.dtype, *, elements: int, std: float) -> list[ChangedWeights]:
    """Return what the first and the last of `steps` Adam steps change."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(elements, generator=rng) * std
    mean, square = torch.zeros(elements), torch.zeros(elements)
    found = []
    for step in range(1, steps + 1):
        before = weight.to(dtype)
        gradient = torch.randn(elements, generator=rng)
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient.square()
        unbiased = mean / (1 - BETAS[0] ** step), square / (1 - BETAS[1] ** step)
        weight = weight - lr * unbiased[0] / (unbiased[1].sqrt() + EPS)
        if step in (1, steps):
            changed = before != weight.to(dtype)
            share = changed.float().mean().item()
            found.append(
                ChangedWeights(
                    lr=lr,
                    step=step,
                    dtype=str(dtype).removeprefix("torch."),
                    changed_elements=share,
                    changed_pieces={
                        size: changed.view(-1, size // dtype.itemsize).any(dim=1).float().mean().item()
                        for size in PIECES
                    },
                    indexed_bytes=share * (INDEX_BYTES + dtype.itemsize) / dtype.itemsize,
                )
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table or JSON lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-7, 1e-6, 1e-5], help="learning rates")
    parser.add_argument("--steps", type=int, default=20, help="Adam steps (20)")
    parser.add_argument("--std", type=float, default=0.02, help="standard deviation of the weights (0.02)")
    parser.add_argument("--mib", type=int, default=4, help="MiB of weights in bfloat16 (4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = args.mib * 2**20 // 2
    reports = [each for lr in args.lr for each in measure(lr, args.steps, torch.bfloat16, elements=size, std=args.std)]
    if args.json:
        for each in reports:
            print(json.dumps(asdict(each)), flush=True)
        return 0
    columns = ["dtype", "lr", "step", "elements", "indexed bytes", *(f"pieces of {size} B" for size in PIECES)]
    print_rows(columns, [_row(each) for each in reports], num_text_columns=1)
    return 0


def _row(report: ChangedWeights) -> list[str]:
    shares = (report.changed_elements, report.indexed_bytes, *report.changed_pieces.values())
    return [report.dtype, f"{report.lr:g}", str(report.step), *(f"{share:.2%}" for share in shares)]


if __name__ == "__main__":
    sys.exit(main())
