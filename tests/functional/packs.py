"""Random packs with the edge cases of real ones: gaps in the mask, fully masked sequences, one-token sequences.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megarl.functional.sequences import Sequences

LENGTHS = [5, 1, 9, 4, 1, 6]
FULLY_MASKED = (1, 3)
"""Indices of sequences without any token inside the mask: one of length 1 and a longer one."""
ONE_TOKEN_SEQUENCE = 4


@dataclass(frozen=True)
class Pack:
    """All inputs of the functions under test, in float64."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    behave_logprobs_T: Tensor
    advantages_T: Tensor
    values_T: Tensor
    old_values_T: Tensor
    rewards_T: Tensor
    mask_T: Tensor
    outcomes_S: Tensor
    cu_seqlens_S: Tensor
    sequences: Sequences

    def bounds(self) -> list[tuple[int, int]]:
        cu = self.cu_seqlens_S.tolist()
        return list(pairwise(cu))

    def split(self) -> Iterator[Pack]:
        """Yield each sequence as a separate pack."""
        for s, (start, end) in enumerate(self.bounds()):
            cu_seqlens_S = torch.tensor([0, end - start], dtype=torch.int32)
            yield replace(
                self.select(torch.arange(start, end)),
                outcomes_S=self.outcomes_S[s : s + 1],
                cu_seqlens_S=cu_seqlens_S,
                sequences=Sequences.of(cu_seqlens_S),
            )

    def select(self, index_t: Tensor) -> Pack:
        tokens = {f.name: getattr(self, f.name)[index_t] for f in fields(self) if f.name.endswith("_T")}
        return replace(self, **tokens)

    def with_logprobs(self, logprobs_T: Tensor) -> Pack:
        return replace(self, logprobs_T=logprobs_T)


def make_pack(seed: int = 0, spread: float = 0.6) -> Pack:
    rng = np.random.default_rng(seed)
    total = sum(LENGTHS)
    cu_seqlens_S = torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)
    mask = rng.random(total) < 0.6
    bounds = list(pairwise(cu_seqlens_S.tolist()))
    mask[slice(*bounds[0])] = [True, False, False, True, True]
    for s in FULLY_MASKED:
        mask[slice(*bounds[s])] = False
    mask[slice(*bounds[ONE_TOKEN_SEQUENCE])] = True

    def tokens(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.tensor(rng.normal(size=total) * scale + shift)

    return Pack(
        logprobs_T=tokens(spread, -2),
        old_logprobs_T=tokens(spread, -2),
        behave_logprobs_T=tokens(spread, -2),
        advantages_T=tokens(),
        values_T=tokens(),
        old_values_T=tokens(),
        rewards_T=tokens(),
        mask_T=torch.tensor(mask),
        outcomes_S=torch.tensor(rng.integers(0, 2, len(LENGTHS)), dtype=torch.double),
        cu_seqlens_S=cu_seqlens_S,
        sequences=Sequences.of(cu_seqlens_S),
    )


def iter_sequences(pack: Pack, *tensors_T: Tensor) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the mask and the tensors of each sequence as arrays."""
    for start, end in pack.bounds():
        yield tuple(t[start:end].numpy() for t in (pack.mask_T, *tensors_T))


def numerical_gradient(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Return the gradient of a scalar function by central differences."""
    out = torch.zeros_like(at)
    for i in range(len(at)):
        shift = torch.zeros_like(at)
        shift[i] = step
        out[i] = (function(at + shift) - function(at - shift)) / (2 * step)
    return out


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of a scalar function by autograd."""
    leaf = at.clone().requires_grad_()
    (out,) = torch.autograd.grad(function(leaf), leaf)
    return out
