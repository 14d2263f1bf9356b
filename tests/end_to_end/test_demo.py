"""The demo learns with a seed that its settings were not tuned on, and does not learn from a random reward."""

import json

import pytest

from tests.end_to_end.launched import run_to_end

pytestmark = pytest.mark.slow

RANDOM_REWARD = (
    "reward.terms={random: {type: python, path: 'tests.end_to_end.random_reward:score'}, "
    "accuracy: {type: numeric, strict: true, weight: 0.0}}"
)


def demo(folder, *arguments):
    run_to_end(folder, "demo", "--out", folder / "demo", *arguments)
    return json.loads((folder / "demo/summary.json").read_text())


def test_accuracy_rises_by_a_quarter(tmp_path):
    summary = demo(tmp_path, "--seed", "11")
    assert summary["eval_after"] - summary["eval_before"] >= 0.25
    assert summary["logprob_abs_max"] <= 1e-4


def test_accuracy_does_not_rise_with_random_rewards(tmp_path):
    summary = demo(tmp_path, "--set", RANDOM_REWARD, "reward.eval_term=accuracy")
    assert summary["eval_after"] - summary["eval_before"] <= 0.1
