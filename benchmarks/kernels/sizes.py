"""The sizes of the workloads."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all workloads."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    """Of hidden states, weight and logits."""
    rows: int
    columns: int
    """Shape of the weight that is quantized."""
    scan: int
    """Length of the scan."""


GPU = Sizes(
    tokens=8192,
    hidden=4096,
    vocabulary=151_936,
    dtype=torch.bfloat16,
    rows=14_336,
    columns=4096,
    scan=1_000_000,
)
"""A micro-batch and layers of a model of 8 billion parameters."""

CPU = Sizes(
    tokens=250,
    hidden=96,
    vocabulary=9001,
    dtype=torch.float32,
    rows=300,
    columns=520,
    scan=10_001,
)
"""Odd sizes that take a second in all."""
