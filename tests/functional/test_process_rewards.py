"""PRIME rewards and the outcome loss against loops and hand-computed values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.functional.process_rewards import implicit_reward_loss, prime_rewards
from megarl.functional.sequences import Sequences
from tests.functional.loss_cases import outcome_loss
from tests.functional.packs import LENGTHS, Pack, gradient, iter_sequences, make_pack, numerical_gradient

GROUPS = [5, 5, 2, 5, 2]
"""Group ids of the completions; the last sequence of the pack is padding."""


def mask_without_last_sequence(pack: Pack) -> Tensor:
    mask_T = pack.mask_T.clone()
    mask_T[pack.cu_seqlens_S[-2] :] = False
    return mask_T


def prime_by_loop(pack: Pack, mask: np.ndarray, outcomes: list[float], beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return process and outcome advantages of each token, computed with loops."""
    bounds = pack.bounds()
    r = beta * (pack.logprobs_T - pack.old_logprobs_T).numpy()
    means = [r[a:b][mask[a:b]].mean() if mask[a:b].any() else 0.0 for a, b in bounds]
    process, outcome_part = np.zeros(len(r)), np.zeros(len(r))
    for i, group in enumerate(GROUPS):
        others = [j for j, g in enumerate(GROUPS) if g == group and j != i]
        for t in range(*bounds[i]):
            if mask[t]:
                later = [u for u in range(t, bounds[i][1]) if mask[u]]
                process[t] = sum(r[u] - np.mean([means[j] for j in others]) for u in later)
                outcome_part[t] = outcomes[i] - np.mean([outcomes[j] for j in others])
    return process, outcome_part


def test_prime_rewards_match_a_loop() -> None:
    outcomes = [1.0, 0.0, 1.0, 1.0, 0.0]
    for seed in range(3):
        pack = make_pack(seed)
        mask_T = mask_without_last_sequence(pack)
        got = prime_rewards(
            pack.logprobs_T,
            pack.old_logprobs_T,
            torch.tensor(outcomes),
            torch.tensor(GROUPS),
            mask_T,
            pack.cu_seqlens_S,
            beta=0.05,
            process_coefficient=5.0,
            outcome_coefficient=3.0,
        )
        process, outcome_part = prime_by_loop(pack, mask_T.numpy(), outcomes, 0.05)
        np.testing.assert_allclose(got.numpy(), 5 * process + 3 * outcome_part, atol=1e-6)


def test_prime_rewards_by_hand() -> None:
    """Two completions, r = 1 1 | 3: process 1 - 3 at both tokens of the first, outcome 1 - 0."""
    got = prime_rewards(
        torch.tensor([1.0, 1.0, 3.0]),
        torch.zeros(3),
        torch.tensor([1.0, 0.0]),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 2, 3]),
        beta=1.0,
        process_coefficient=1.0,
        outcome_coefficient=10.0,
    )
    assert got.tolist() == pytest.approx([-4 + 10, -2 + 10, 2 - 10])


def test_outcome_loss_matches_a_loop() -> None:
    pack = make_pack()
    want = []
    rows = iter_sequences(pack, pack.logprobs_T, pack.old_logprobs_T)
    for (mask, new, ref), right in zip(rows, pack.outcomes_S.tolist(), strict=True):
        p = 1 / (1 + math.exp(-0.7 * (new - ref)[mask].sum()))
        want.append(-(right * math.log(p) + (1 - right) * math.log(1 - p)) if mask.any() else 0.0)
    assert outcome_loss(pack).tolist() == pytest.approx(want, rel=1e-10)
    assert want.count(0.0) == 2


def test_outcome_loss_gradient_and_parts() -> None:
    pack = make_pack(1)

    def total(logprobs_T: Tensor) -> Tensor:
        return outcome_loss(pack.with_logprobs(logprobs_T)).sum()

    want = numerical_gradient(total, pack.logprobs_T)
    assert want.abs().max() > 0.01
    assert torch.allclose(gradient(total, pack.logprobs_T), want, atol=1e-8)
    assert torch.allclose(torch.cat([outcome_loss(part) for part in pack.split()]), outcome_loss(pack), rtol=1e-12)


def test_outcome_loss_of_an_extreme_logit_is_finite() -> None:
    sequences = Sequences.of(torch.tensor([0, 2]))
    args = (torch.tensor([0.0, -1e5]), torch.zeros(2), torch.tensor([1.0]), torch.ones(2, dtype=torch.bool))
    assert implicit_reward_loss(*args, sequences, beta=0.05).tolist() == pytest.approx([5000.0])


def test_a_group_of_one_is_rejected() -> None:
    pack = make_pack()
    with pytest.raises(ValueError, match="at least 2 completions per group"):
        prime_rewards(
            pack.logprobs_T,
            pack.old_logprobs_T,
            torch.ones(len(LENGTHS)),
            torch.arange(len(LENGTHS)),
            pack.mask_T,
            pack.cu_seqlens_S,
            beta=0.05,
            process_coefficient=5.0,
            outcome_coefficient=5.0,
        )
