"""Completions that leave the loss.

Those whose reward failed (`on_error: drop`): every algorithm behaves as if they had not been sampled. Truncated ones,
with `mask_truncated_completions`: they count in baselines and metrics, not in the policy's loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.batch.sample_table import SampleKey, SampleRef
from megarl.errors import LimitError
from megarl.megatron.requests import TrainRequest
from tests.algorithms.scripted_run import FinishedRun, run_script

MODEL_ROLES = ("policy", "reference", "critic", "cost_critic", "reward_model", "teacher", "reward cost")
ANY_SHARE = {"max_failed_share": 1.0}
NO_KL: dict[str, Any] = {"kl_reward": None}
MATCH = {"match": {"type": "numeric"}}
COST = {"terms": {**MATCH, "cost": {"type": "model", "path": "cost"}}}
PRETRAINING = {"max_steps": 2, "window": 1, "settled": 0.1, "min_explained_variance": -1000.0}

ALGORITHMS: list[dict[str, Any]] = [
    {"type": "grpo"},
    {"type": "grpo", "kl_loss": None, "kl_reward": {"coefficient": 0.1, "target": 0.1, "horizon": 60}},
    {"type": "rloo"},
    {"type": "dr_grpo"},
    {"type": "gspo"},
    {"type": "cispo"},
    {"type": "gmpo"},
    {"type": "dapo"},
    {"type": "reinforce_pp"},
    {"type": "reinforce_pp_baseline"},
    {"type": "remax"},
    {"type": "ppo"},
    {"type": "pf_ppo"},
    {"type": "vapo", "pretraining": PRETRAINING},
    {"type": "safe_rlhf"},
    {"type": "prime"},
    {"type": "distillation", "teacher": {"path": "teacher"}},
]


def value_key(sample: SampleRef) -> SampleKey:
    """Samples of a group have different lengths; their index changes if others are left out."""
    return sample.payload, sample.num_tokens


def models() -> dict[str, dict[str, Any]]:
    fields: dict[str, dict[str, Any]] = {
        role: {"value_key": value_key, "offset": 0.1 * n} for n, role in enumerate(MODEL_ROLES)
    }
    fields["reward cost"] |= {"score": lambda key: 0.5 + key[1] % 3}
    return fields


def some_fail(label: str, number: int, sample: int) -> float | None:
    """Rewards that differ within groups; in a step, two samples of the first group and all of the last one fail."""
    if label.endswith("greedy"):
        return 0.25
    failed = {0: (1, 2), 2: (0, 1, 2, 3, 4)}
    if label != "step-2" and sample in failed.get(number, ()):
        return None
    return float((number + sample) % 2)


def run(folder: Path, algorithm: dict[str, Any], script: Any, *, steps: int = 2, **options: Any) -> FinishedRun:
    sections = {"reward": {**(COST if algorithm["type"] == "safe_rlhf" else {"terms": MATCH}), **ANY_SHARE}}
    tree = {"prompts_per_step": 3, "group_size": 5, **algorithm}
    return run_script(folder, tree, script, steps=steps, models=models(), **{**sections, **options})


def columns_of(request: TrainRequest) -> dict[str, dict[SampleKey, Any]]:
    """Return the values per token by name of the column and key of the sample."""
    payloads: dict[str, Any] = dict(request.columns)
    return {
        name: {key: values for part in payload.fetch() for key, values in part.items()}
        for name, payload in payloads.items()
    }


def trained_on(run: FinishedRun) -> list[Any]:
    """Return all that each model was trained on, without the indices of the samples."""
    found = []
    for call in run.log:
        if call.method != "train":
            continue
        columns = columns_of(call.argument)
        for batch in call.argument.mini_batches:
            samples = [
                (value_key(s), dict(s.scalars), [(name, columns[name][s.key].tolist()) for name in sorted(columns)])
                for s in batch.samples
            ]
            found.append((call.target, call.argument.loss, batch.denominators, samples))
    return found


def comparable_metrics(run: FinishedRun) -> list[dict[str, float]]:
    """Return the metrics of each step, without times, memory and counts of dropped completions."""
    skipped = ("time/", "controller/", "tokens_per_second")
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(skipped) and not name.endswith(("dropped", "failed"))
        }
        for row in [*run.pretraining, *run.metrics]
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda tree: "-".join(tree))
def test_training_equals_that_without_the_dropped_completions(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    dropped = run(tmp_path / "dropped", algorithm, some_fail)
    brute_force = run(tmp_path / "brute-force", algorithm, some_fail, rollout_fields={"omits_dropped": True})
    assert trained_on(dropped) == trained_on(brute_force)
    assert len(trained_on(dropped)) >= 2
    assert comparable_metrics(dropped) == comparable_metrics(brute_force)
    is_dapo = algorithm["type"] == "dapo"  # it samples until the batch is full, seven completions dropped in each
    assert dropped.metrics[0]["reward/dropped"] == (7 * dropped.metrics[0]["dapo/batches"] if is_dapo else 7)
    assert dropped.metrics[0]["reward/match/failed"] == dropped.metrics[0]["reward/dropped"]
    assert brute_force.metrics[0]["reward/dropped"] == 0
    assert "reward/match/failed" not in brute_force.metrics[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda tree: "-".join(tree))
def test_a_step_without_rewards_leaves_the_policy_as_it_is(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    def all_fail(label: str, number: int, sample: int) -> float | None:
        return float(sample % 2) if label.startswith("step-2") else None

    finished = run(tmp_path, algorithm, all_fail)
    assert len(finished.arguments("policy", "train")) == 1
    assert finished.pushed_versions == [0, 2]
    first, second = finished.metrics
    assert "reward/mean" not in first
    assert "reward/mean" in second
    assert first["reward/dropped"] >= 15
    assert all(value == value for value in first.values()), "no metric is NaN"


def test_a_reward_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(LimitError) as caught:
        run(tmp_path, {"type": "grpo", "kl_loss": None}, lambda *_: None, steps=9)
    assert "step 4: all completions were dropped, because rewards failed" in str(caught.value)
    assert "4 steps in a row did not update the policy" in str(caught.value)


def one_left(label: str, number: int, sample: int) -> float | None:
    return None if number == 0 and sample > 0 and not label.endswith("greedy") else float(sample % 2)


def trained_groups(finished: FinishedRun) -> list[int]:
    (request,) = finished.arguments("policy", "train")
    return sorted({sample.payload for batch in request.mini_batches for sample in batch.samples})


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda tree: "-".join(tree))
def test_a_completion_without_others_to_compare_with_is_left_out(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    finished = run(tmp_path, algorithm, one_left, steps=1)
    num_dropped = finished.metrics[0]["reward/dropped"]
    batches = finished.metrics[0].get("dapo/batches", 1)
    if finished.run.config.algorithm.needs_group:
        assert (trained_groups(finished), num_dropped) == ([0, 1] if batches == 1 else [0, 1, 2], 5 * batches)
    else:
        assert (trained_groups(finished), num_dropped) == ([0, 1, 2], 4)
    assert finished.metrics[0]["reward/match/failed"] == 4 * batches


def test_prompts_whose_greedy_completion_was_dropped_have_no_baseline(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float | None:
        if label.endswith("greedy"):
            return None if number == 1 else 0.1 * number
        return 1.0 + number

    finished = run(tmp_path, {"type": "remax", **NO_KL}, script, steps=1)
    assert finished.metrics[0]["remax/greedy_reward"] == pytest.approx(0.1)
    assert finished.metrics[0]["reward/mean"] == pytest.approx(2.0)
    (request,) = finished.arguments("policy", "train")
    assert {key: float(values[-1]) for key, values in columns_of(request)["advantages"].items()} == {
        (g, i): pytest.approx(reward) for g, reward in enumerate((1.0, 2.8)) for i in range(5)
    }


MASKABLE: list[dict[str, Any]] = [
    {"type": "grpo", "kl_loss": None},
    {"type": "reinforce_pp", "kl_reward": None},
    {"type": "ppo", "kl_reward": None},
    {"type": "pf_ppo", "kl_reward": None},
]
MASKED = {"mask_truncated_completions": True}


def half_pass(label: str, number: int, sample: int) -> float:
    return float((number + sample) % 2)


def second_is_truncated(label: str, number: int, sample: int) -> bool:
    return sample == 1


def trained_samples(request: TrainRequest) -> list[tuple[SampleKey, float, list[float]]]:
    """Return key and advantages of each sample, per sequence and per token."""
    columns = columns_of(request)
    (batch,) = request.mini_batches
    return [
        (s.key, s.scalars.get("advantages", 0.0), columns["advantages"][s.key].tolist() if columns else [])
        for s in batch.samples
    ]


@pytest.mark.parametrize("algorithm", MASKABLE, ids=lambda tree: tree["type"])
def test_truncated_completions_count_in_baselines_but_not_in_the_loss(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    masked, unmasked = (
        run_script(
            tmp_path / str(len(fields)),
            algorithm | fields,
            half_pass,
            rollout_fields={"truncated": second_is_truncated},
        )
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
        (of_masked,), (of_unmasked,) = (run.arguments("critic", "train")[0].mini_batches for run in (masked, unmasked))
        assert [sample.key for sample in of_masked.samples] == [sample.key for sample in of_unmasked.samples]


def test_a_step_of_truncated_completions_has_no_update(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "limits": {"max_skips_in_a_row": 1}}
    tree = {"type": "grpo", "kl_loss": None, **MASKED}
    first: dict[str, Any] = {"truncated": lambda label, *_: label == "step-1"}
    run = run_script(tmp_path / "one", tree, half_pass, rollout_fields=first, **options)
    assert len(run.arguments("policy", "train")) == 1
    assert run.messages == ["step 1: all completions were truncated (algorithm.mask_truncated_completions)"]
    assert run.pushed_versions == [0, 2]
    with pytest.raises(LimitError, match="2 steps in a row did not update the policy"):
        run_script(tmp_path / "all", tree, half_pass, rollout_fields={"truncated": lambda *_: True}, **options)
