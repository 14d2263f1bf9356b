"""Safe RLHF advantages and the Lagrange multiplier."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from megarl.functional.lagrangian import LagrangeMultiplier


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
