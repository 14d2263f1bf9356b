"""The outcome loss of PRIME against a loop; its advantages are tested with the estimators."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.functional.process_rewards import implicit_reward_loss
from megarl.functional.sequences import Sequences
from tests.functional.loss_cases import outcome_loss
from tests.functional.packs import gradient, iter_sequences, make_pack, numerical_gradient


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
