"""Truncated completions with `mask_truncated_completions`: in baselines and metrics, not in the policy's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.batch.sample_table import SampleKey
from megarl.errors import LimitError
from megarl.megatron.requests import TrainRequest
from tests.algorithms.scripted_run import run_script

ALGORITHMS: list[dict[str, Any]] = [
    {"type": "grpo", "kl_loss": None},
    {"type": "reinforce_pp", "kl_reward": None},
    {"type": "ppo", "kl_reward": None},
    {"type": "pf_ppo", "kl_reward": None},
]
MASKED = {"mask_truncated_completions": True}


def script(label: str, number: int, sample: int) -> float:
    return float((number + sample) % 2)


def second_is_truncated(label: str, number: int, sample: int) -> bool:
    return sample == 1


def trained_samples(request: TrainRequest) -> list[tuple[SampleKey, float, list[float]]]:
    """Return key and advantages of each sample, per sequence and per token."""
    columns = {
        name: {key: values for part in payload.fetch() for key, values in part.items()}
        for name, payload in request.columns.items()
    }
    (batch,) = request.mini_batches
    return [
        (s.key, s.scalars.get("advantages", 0.0), columns["advantages"][s.key].tolist() if columns else [])
        for s in batch.samples
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda tree: tree["type"])
def test_they_count_in_baselines_but_not_in_the_loss(algorithm: dict[str, Any], tmp_path: Path) -> None:
    masked, unmasked = (
        run_script(tmp_path / str(len(fields)), algorithm | fields, script, truncated=second_is_truncated)
        for fields in (MASKED, {})
    )
    (got,), (want,) = (run.arguments("policy", "train") for run in (masked, unmasked))
    assert trained_samples(got) == [sample for sample in trained_samples(want) if sample[0][1] != 1]
    assert 0 < len(trained_samples(got)) < len(trained_samples(want))
    # sample i has 3 + i sampled tokens
    (batch,) = got.mini_batches
    assert batch.denominators.num_sequences == len(batch.samples)
    assert batch.denominators.num_tokens == sum(3 + s.index for s in batch.samples)
    for name in ("response/truncated", "reward/mean", "response/length"):
        assert masked.metrics[0][name] == unmasked.metrics[0][name]
    assert masked.metrics[0]["response/truncated"] == pytest.approx(1 / 3)
    if "ppo" in algorithm["type"]:
        critics = [run.arguments("critic", "train")[0] for run in (masked, unmasked)]
        assert trained_keys(critics[0]) == trained_keys(critics[1])


def trained_keys(request: TrainRequest) -> list[SampleKey]:
    return [sample.key for batch in request.mini_batches for sample in batch.samples]


def test_a_step_of_truncated_completions_has_no_update(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "limits": {"max_skips_in_a_row": 1}}
    tree = {"type": "grpo", "kl_loss": None, **MASKED}
    run = run_script(tmp_path / "one", tree, script, truncated=lambda label, *_: label == "step-1", **options)
    assert len(run.arguments("policy", "train")) == 1
    assert run.messages == ["step 1: all completions were truncated (algorithm.mask_truncated_completions)"]
    assert run.pushed_versions == [0, 2]
    with pytest.raises(LimitError, match="2 steps in a row did not update the policy"):
        run_script(tmp_path / "all", tree, script, truncated=lambda *_: True, **options)
