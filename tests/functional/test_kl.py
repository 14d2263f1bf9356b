"""KL estimators and the adaptive KL coefficient."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from megarl.config.algorithms.policy import KlKind
from megarl.functional.kl import AdaptiveKl, kl_penalty


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalty_matches_a_loop(kind: KlKind) -> None:
    new, ref = np.random.default_rng(0).normal(size=(2, 100))
    got = kl_penalty(torch.tensor(new), torch.tensor(ref), kind=kind)
    want = []
    for d in new - ref:
        want.append({"k1": d, "k2": d**2 / 2, "k3": math.exp(-d) - 1 + d}[kind])
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
