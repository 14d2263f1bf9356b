"""KL estimators, and coefficients that adapt: of the KL penalty, and Lagrange multipliers."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from megarl.config.policy import KlKind
from megarl.functional.kl import AdaptiveKl, kl_penalty
from megarl.functional.lagrangian import LagrangeMultiplier


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalty_matches_a_loop(kind: KlKind) -> None:
    new, ref = np.random.default_rng(0).normal(size=(2, 100))
    got = kl_penalty(torch.tensor(new), torch.tensor(ref), kind=kind)
    want = [{"k1": d, "k2": d**2 / 2, "k3": math.exp(-d) - 1 + d}[kind] for d in new - ref]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-15)


def test_k3_is_exact_near_0_and_finite_far_off() -> None:
    small = kl_penalty(torch.tensor([1e-3]), torch.tensor([0.0]), kind="k3")
    assert small.item() == pytest.approx(4.998334e-7, rel=2e-4)
    assert kl_penalty(torch.tensor([-1e4]), torch.tensor([0.0]), kind="k3").isfinite().all()


@pytest.mark.parametrize(
    ("kl", "num_samples", "want"),
    [(0.2, 256, 0.00100512), (0.11, 256, 0.00100256), (0.1, 256, 0.001), (0.0, 10_000, 0.0008), (1.0, 10_000, 0.0012)],
)
def test_the_coefficient_follows_the_target(kl: float, num_samples: int, want: float) -> None:
    adaptive = AdaptiveKl(coefficient=0.001, target=0.1, horizon=10_000)
    assert adaptive.update(kl, num_samples) == pytest.approx(want, rel=1e-9)
    assert adaptive.coefficient == pytest.approx(want, rel=1e-9)
    assert AdaptiveKl(**asdict(adaptive)) == adaptive


def test_more_samples_than_the_horizon_cannot_make_the_coefficient_negative() -> None:
    assert AdaptiveKl().update(0.0, 1_000_000) == 0.0


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


@pytest.mark.parametrize("value", [0.0, -1.0, 6.0])
def test_an_invalid_multiplier_is_rejected(value: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 5.0, got {value}"):
        LagrangeMultiplier(value)
