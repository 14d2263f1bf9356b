"""Safe RLHF advantages and the Lagrange multiplier."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from megarl.functional.lagrangian import LagrangeMultiplier, safe_rlhf_advantages


def test_golden_values() -> None:
    got = safe_rlhf_advantages(torch.tensor([1.0]), torch.tensor([0.4]), multiplier=1.0)
    assert got.tolist() == pytest.approx([0.3])
    assert LagrangeMultiplier().update(0.5) == pytest.approx(1.0513, abs=5e-5)


def test_combined_advantages_match_a_loop() -> None:
    rewards, costs = np.random.default_rng(0).normal(size=(2, 20))
    for multiplier in (0.0, 0.5, 4.0):
        got = safe_rlhf_advantages(torch.tensor(rewards), torch.tensor(costs), multiplier=multiplier)
        want = [(r - multiplier * c) / (1 + multiplier) for r, c in zip(rewards, costs, strict=True)]
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


def test_the_multiplier_rises_above_the_limit_up_to_its_maximum_and_falls_below() -> None:
    multiplier = LagrangeMultiplier(value=2.0, lr=0.5, maximum=3.0, limit=1.0)
    assert multiplier.update(1.0) == pytest.approx(2)
    assert multiplier.update(0.0) == pytest.approx(2 * math.exp(-0.5))
    assert multiplier.update(1.5) == pytest.approx(2 * math.exp(-0.25))
    assert multiplier.update(1e6) == pytest.approx(3)
    assert LagrangeMultiplier(**asdict(multiplier)) == multiplier
    low = multiplier.update(-1e6)
    assert 0 < low < 1e-100
    assert multiplier.update(100.0) > low
    assert LagrangeMultiplier(**asdict(LagrangeMultiplier(0.7))) == LagrangeMultiplier(0.7)


@pytest.mark.parametrize("value", [0.0, -1.0, 6.0])
def test_an_invalid_multiplier_is_rejected(value: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 5.0, got {value}"):
        LagrangeMultiplier(value)
