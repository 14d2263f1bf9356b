"""Limits: plain numbers, bounds with actions, invalid limits, violations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megarl.config import RunConfig, dump_config, load_config
from megarl.config.limits import AUTO_LIMITS, LimitConfig, LimitsConfig
from tests.config.runs import error_message, has_parts, make_run


def limits(given: dict[str, Any] | None = None, *overrides: str) -> LimitsConfig:
    return make_run(*overrides, limits=given or {}).limits


def test_defaults_limit_the_mismatch_and_values_that_are_not_finite() -> None:
    got = limits()
    assert got.mismatch == {}
    for dtype, known in AUTO_LIMITS.items():
        resolved = got.resolved(dtype)
        assert {key: limit.max for key, limit in resolved.mismatch.items()} == {
            key: each.limit for key, each in known.items()
        }
        assert all(each.healthy[1] < each.limit for each in known.values())
    assert limits({"logprob_kl": None}).resolved("float32").logprob_kl is None
    assert limits({"logprob_kl": 3}).resolved("float32").logprob_kl == LimitConfig(max=3)
    assert (got.logprob_abs_max, got.kl, got.reward, got.grad_norm) == (None, None, None, None)
    assert (got.not_finite, got.max_skips_in_a_row) == ("stop", 3)


def test_a_plain_number_is_a_maximum_with_action_stop() -> None:
    assert limits({"kl": 1}).kl == LimitConfig(max=1.0, min=None, action="stop")
    got = limits({}, "limits.logprob_abs_max=1e-3", "limits.kl.max=0.2", "limits.kl.action=skip")
    assert (got.logprob_abs_max, got.kl) == (LimitConfig(max=1e-3), LimitConfig(max=0.2, action="skip"))


def test_limits_survive_the_round_trip(tmp_path: Any) -> None:
    config = make_run(limits={"kl": 0.5, "reward": {"min": -2, "action": "warn"}, "not_finite": "skip"})
    text = dump_config(config)
    assert "  kl:\n    max: 0.5\n    min: null\n    action: stop\n" in text
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(RunConfig, tmp_path / "run.yaml") == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": 0.5}, "limits: reward needs max or min, as in {min: 0.5}, got 0.5"),
        ({"kl": {"action": "warn"}}, "limits.kl: a limit needs max or min"),
        ({"reward": {"min": 2, "max": 2}}, "limits.reward: min needs to be below max, got 2 >= 2"),
        ({"logprob_abs_max": 0}, "limits: logprob_abs_max.max needs to be above 0, got 0"),
        ({"grad_norm": {"max": -1}}, "limits: grad_norm.max needs to be above 0, got -1"),
        ({"kl": True}, "limits.kl: needs a mapping, got True"),
        ({"kl": math.nan}, "limits.kl.max: Input should be a finite number, got nan"),
        ({"kl": {"max": 1, "action": "halt"}}, "limits.kl.action: ... 'warn', 'skip' or 'stop', got 'halt'"),
        ({"kl": {"maximum": 1}}, "limits.kl.maximum: unknown key"),
        ({"not_finite": "warn"}, "limits.not_finite: Input should be 'skip' or 'stop', got 'warn'"),
        ({"max_skips_in_a_row": -1}, "limits.max_skips_in_a_row: Input should be greater than or equal to 0, got -1"),
    ],
)
def test_invalid_limits_are_rejected(given: dict[str, Any], message: str) -> None:
    assert has_parts(error_message(limits=given), message)


def test_limit_of_kl_needs_a_kl_penalty() -> None:
    message = error_message(limits={"kl": 1}, algorithm={"kl_loss": None})
    assert has_parts(message, "RunConfig: limits.kl needs algorithm.kl_loss or algorithm.kl_reward ... got null")
    assert limits({"kl": 1}, "algorithm={kl_loss: null, kl_reward: {}}").kl == LimitConfig(max=1)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ({"max": 0.5}, 0.5, None),
        ({"max": 0.5}, 0.7, "a/b = 0.7 passed limits.k = 0.5"),
        ({"max": 1e-12}, 3.21e-5, "a/b = 3.21e-05 passed limits.k = 1e-12"),
        ({"max": 0.5}, math.nan, "a/b = nan passed limits.k = 0.5"),
        ({"max": 0.5}, -math.inf, None),
        ({"min": -1}, -1.0, None),
        ({"min": -1}, -1.5, "a/b = -1.5 passed limits.k.min = -1"),
        ({"min": -1}, math.nan, "a/b = nan passed limits.k.min = -1"),
        ({"min": -1, "max": 1}, 0.0, None),
        ({"min": -1, "max": 1}, math.inf, "a/b = inf passed limits.k = 1"),
    ],
)
def test_violations_include_nan(limit: dict[str, Any], value: float, message: str | None) -> None:
    assert LimitConfig.model_validate(limit).violation("k", "a/b", value) == message
