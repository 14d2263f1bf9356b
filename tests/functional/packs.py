"""Random packs with the edge cases of real ones, and every loss over packed tokens as a function of one pack.

The edge cases: gaps in the mask, fully masked sequences, one-token sequences. Shapes: T packed tokens, S sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from megarl import functional as fn
from megarl.functional.losses import PolicyLossOutput, Sequences

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
        return list(pairwise(self.cu_seqlens_S.tolist()))

    def split(self) -> Iterator[Self]:
        """Yield each sequence as a separate pack."""
        for s, (start, end) in enumerate(self.bounds()):
            cu_seqlens_S = torch.tensor([0, end - start], dtype=torch.int32)
            yield replace(
                self.select(torch.arange(start, end)),
                outcomes_S=self.outcomes_S[s : s + 1],
                cu_seqlens_S=cu_seqlens_S,
                sequences=Sequences.of(cu_seqlens_S),
            )

    def select(self, index_t: Tensor) -> Self:
        tokens = {f.name: getattr(self, f.name)[index_t] for f in fields(self) if f.name.endswith("_T")}
        return replace(self, **tokens)

    def with_logprobs(self, logprobs_T: Tensor) -> Self:
        return replace(self, logprobs_T=logprobs_T)


def make_pack(seed: int = 0, spread: float = 0.6) -> Pack:
    rng, total = np.random.default_rng(seed), sum(LENGTHS)
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


def inputs(pack: Pack) -> tuple[Tensor, Tensor, Tensor]:
    return pack.logprobs_T, pack.old_logprobs_T, pack.advantages_T


def decoupled(pack: Pack) -> PolicyLossOutput:
    new_T, old_T, advantages_T = inputs(pack)
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "behave_cap": 1.3, "dual_clip": 1.5}
    return fn.decoupled_policy_loss(new_T, old_T, pack.behave_logprobs_T, advantages_T, **bounds)


POLICY_LOSSES: dict[str, Callable[[Pack], PolicyLossOutput]] = {
    "clipped": lambda pack: fn.clipped_policy_loss(*inputs(pack), clip_low=0.2, clip_high=0.28),
    "dual-clipped": lambda pack: fn.clipped_policy_loss(*inputs(pack), clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    "gspo": lambda pack: fn.gspo_loss(*inputs(pack), pack.mask_T, pack.sequences, clip_low=0.1, clip_high=0.15),
    "cispo": lambda pack: fn.cispo_loss(*inputs(pack), clip_high=0.5),
    "gmpo": lambda pack: fn.gmpo_loss(*inputs(pack), pack.mask_T, pack.sequences, clip_low=0.4, clip_high=0.3),
    "decoupled": decoupled,
}

LOSSES: dict[str, Callable[[Pack], Tensor]] = {
    **{name: lambda pack, loss=loss: loss(pack).loss_T for name, loss in POLICY_LOSSES.items()},
    **{
        kind: lambda pack, kind=kind: fn.kl_penalty(pack.logprobs_T, pack.old_logprobs_T, kind=kind)
        for kind in ("k1", "k2", "k3")
    },
    # the input to differentiate is always `logprobs_T`; the value loss takes it as values
    "value": lambda pack: fn.value_loss(pack.logprobs_T, pack.old_logprobs_T, pack.values_T, clip=0.5).loss_T,
    "value, unclipped": lambda pack: (
        fn.value_loss(pack.logprobs_T, pack.old_logprobs_T, pack.values_T, clip=None).loss_T
    ),
}


def outcome_loss(pack: Pack) -> Tensor:
    """[S] outcome loss of each sequence."""
    return fn.implicit_reward_loss(
        pack.logprobs_T, pack.old_logprobs_T, pack.outcomes_S, pack.mask_T, pack.sequences, beta=0.7
    )
