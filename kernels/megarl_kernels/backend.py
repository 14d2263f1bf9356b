"""Triton, and whether an op runs its Triton kernel or its PyTorch reference.

Modules with kernels import `jit`, `tl` and `triton` from here, so that they can be imported without Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["interpreted", "jit", "tl", "triton", "uses_triton"]

VARIABLE = "MEGARL_KERNELS"
"""Environment variable; `torch` makes all ops run their references."""


def jit(function: Callable[..., Any]) -> Any:
    """Return `function` as a Triton kernel; without Triton, return it unchanged, and it cannot be called."""
    return function if triton is None else triton.jit(function)


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on the CPU; decided before this package is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(tensor: Tensor) -> bool:
    """Return whether ops on `tensor` run Triton kernels: on CUDA where Triton is installed, except float64.

    Under `TRITON_INTERPRET=1` also on the CPU, for tests.

    Raises:
        ValueError: MEGARL_KERNELS has a value other than `auto` and `torch`.
    """
    chosen = os.environ.get(VARIABLE, "auto")
    if chosen not in ("auto", "torch"):
        raise ValueError(f"{VARIABLE} needs to be auto or torch, got {chosen!r}")
    if chosen == "torch" or triton is None or tensor.dtype == torch.float64:
        return False
    return tensor.is_cuda or interpreted()
