"""The example of an algorithm inside another: PPO's advantages of rewards minus those of greedy completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.algorithms.scripted_run import FinishedRun, run_script

EXAMPLE = Path(__file__).parents[2] / "examples/nested-algorithm"


def reward(label: str, number: int, sample: int) -> float:
    """Greedy completions have 2 and 3, the samples of a prompt 0, 1 and 2."""
    return 2.0 + number if "greedy" in label else float(sample)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_advantages_are_those_of_ppo_for_shifted_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    options: dict[str, Any] = {"kl_reward": None, "whiten": False}
    sections = {"schedule": {"type": schedule, "lookahead": 0, "max_staleness": 0}} if schedule == "async" else {}
    nested = run_script(tmp_path / "a", {"type": "nested:Nested", **options}, reward, **sections)
    shifted = run_script(
        tmp_path / "b", {"type": "ppo", **options}, lambda label, number, sample: sample - 2.0 - number
    )
    (found,), (expected,) = (trained_advantages(each) for each in (nested, shifted))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, atol=1e-6)
    plain = run_script(tmp_path / "c", {"type": "ppo", **options}, lambda label, number, sample: float(sample))
    (other,) = trained_advantages(plain)
    assert any(np.abs(other[key] - found[key]).max() > 1 for key in found)


def trained_advantages(finished: FinishedRun) -> list[dict[Any, Any]]:
    """Return the advantages of each training request of the policy, by sample."""
    requests = finished.arguments("policy", "train")
    return [
        {key: values for part in request.columns["advantages"].fetch() for key, values in part.items()}
        for request in requests
    ]
