"""Synthetic packed batches. Shapes: T packed tokens, S sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LONGEST = 32_768
LIMITS = (16, 16_384)
"""Shortest and longest length of the other sequences, in tokens."""

TURN = 128
"""Number of tokens of a turn in workloads with holes, where every third turn is a tool response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWorkload:
    """Arguments of one kernel call, in float32."""

    name: str
    rewards_T: Tensor
    values_T: Tensor
    mask_T: Tensor
    cu_seqlens_S: Tensor
    lam: float | Tensor


def make_kernel_workloads(num_tokens: int, seed: int) -> Iterator[KernelWorkload]:
    """Yield workloads with long-tailed lengths, one of 32,768 tokens if possible: unmasked, then a third masked, twice.

    The last workload has a separate lambda for each sequence.
    """
    rng = np.random.default_rng(seed)
    lengths = [min(LONGEST, num_tokens)]
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(np.clip(rng.lognormal(mean=6.5, sigma=1.0), *LIMITS))))
    rng.shuffle(lengths)
    rewards_T, values_T = (torch.tensor(x, dtype=torch.float32) for x in rng.normal(size=(2, num_tokens)))
    whole_T = torch.ones(num_tokens, dtype=torch.bool)
    holes_T = torch.arange(num_tokens) // TURN % 3 != 1
    lam_S = torch.tensor(rng.random(len(lengths)), dtype=torch.float32)
    masks_and_lambdas: dict[str, tuple[Tensor, float | Tensor]] = {
        "whole": (whole_T, 0.95),
        "holes": (holes_T, 0.95),
        "holes, lambdas": (holes_T, lam_S),
    }
    for name, (mask_T, lam) in masks_and_lambdas.items():
        yield KernelWorkload(
            name=name,
            rewards_T=rewards_T,
            values_T=values_T,
            mask_T=mask_T,
            cu_seqlens_S=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
            lam=lam,
        )
