"""Every algorithm under schedules that sample ahead, with fake models and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.errors import ConfigError, LimitError
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.rl_run import RLRun
from tests.algorithms.scripted_run import FinishedRun
from tests.algorithms.test_dropped_completions import ALGORITHMS, comparable_metrics, run, some_fail, trained_on

IGNORED_METRICS = ("schedule/", "staleness/", "drift/", "policy_version/")

WITHOUT_LOOKAHEAD: dict[str, Any] = {"type": "async", "lookahead": 0, "max_staleness": 0}


def informative(label: str, number: int, sample: int) -> float:
    """Rewards of which some are 0 and some 1 in every group, so that no algorithm filters a group."""
    return 0.25 if label.endswith("greedy") else float(sample % 2)


def few_fail(label: str, number: int, sample: int) -> float | None:
    """As `some_fail`, but every group has enough rewards to be trained on."""
    return informative(label, number, sample) if number else some_fail(label, number, sample)


def metrics_of(finished: FinishedRun) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(IGNORED_METRICS)}
        for row in comparable_metrics(finished)
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda tree: "-".join(tree))
def test_async_without_lookahead_equals_sync(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    refills = algorithm["type"] in ("dapo", "prime")  # which sync does in whole batches, or not at all
    script, tree = informative if refills else few_fail, {"rollout_is": None, **algorithm}
    sync = run(tmp_path / "sync", tree, script, steps=3)
    scheduled = run(tmp_path / "async", tree, script, steps=3, schedule=WITHOUT_LOOKAHEAD)
    assert trained_on(scheduled) == trained_on(sync)
    assert len(trained_on(sync)) >= 3
    assert metrics_of(scheduled) == metrics_of(sync)
    assert scheduled.pushed_versions == sync.pushed_versions
    assert all(row["staleness/max"] == 0 for row in scheduled.metrics)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda tree: "-".join(tree))
@pytest.mark.parametrize("kind", ["one_step_off", "async"])
def test_no_prompt_is_skipped_or_repeated(tmp_path: Path, algorithm: dict[str, Any], kind: str) -> None:
    finished = run(tmp_path, algorithm, informative, steps=4, schedule={"type": kind})
    jobs = [job for job in finished.arguments("engines", "sample") if isinstance(job, GroupJob)]
    num_pretraining = 3 * len(finished.pretraining)
    assert [job.prompt.prompt_id for job in jobs] == [f"p{i + num_pretraining}" for i in range(3 * 4)]
    assert len({job.request_id for job in jobs}) == len(jobs)
    assert all(job.has_baseline == (algorithm["type"] == "remax") for job in jobs)
    assert len(finished.metrics) == 4
    assert finished.pushed_versions == [0, 1, 2, 3, 4]
    assert finished.run.config.algorithm.rollout_is is not None


@pytest.mark.parametrize("algorithm", ["dapo", "prime"])
@pytest.mark.parametrize("kind", ["one_step_off", "async"])
def test_filtered_groups_are_replaced(tmp_path: Path, algorithm: str, kind: str) -> None:
    def every_second(label: str, number: int, sample: int) -> float:
        return float(sample % 2) if (number + int(label.split("-")[1])) % 2 else 1.0

    finished = run(tmp_path, {"type": algorithm}, every_second, steps=3, schedule={"type": kind})
    assert [len(request.payloads) for request in finished.arguments("policy", "train")] == [3, 3, 3]
    assert finished.metrics[-1]["schedule/filtered"] >= 8


def test_engines_are_probed_where_a_batch_has_no_token_of_the_last_version(tmp_path: Path) -> None:
    tree = {"type": "grpo", "kl_loss": None}
    finished = run(tmp_path / "healthy", tree, informative, steps=6, schedule={"type": "one_step_off"})
    assert finished.arguments("engines", "probe") == [f"probe-{step}" for step in range(2, 7)]
    assert finished.metrics[1]["train_infer_mismatch/logprob_abs_max"] == pytest.approx(0.0, abs=1e-6)
    wrong: dict[str, Any] = {"schedule": {"type": "one_step_off"}, "rollout_fields": {"mismatch": 0.5}}
    with pytest.raises(LimitError, match=r"step 2: .*train_infer_mismatch/kl"):
        run(tmp_path / "corrupt", tree, informative, steps=6, **wrong)
    sync = run(tmp_path / "sync", tree, informative, steps=3)
    assert sync.arguments("engines", "probe") == []


def test_tokens_above_the_cap_leave_the_loss(tmp_path: Path) -> None:
    """The groups that were begun first finish last; the first token of a completion is of the version at its start."""
    masking = {"type": "async", "lookahead": 1, "max_staleness": 1, "late": "mask"}
    finished = run(tmp_path, {"type": "grpo", "kl_loss": None}, informative, steps=6, schedule=masking)
    requests = finished.arguments("policy", "train")
    versions = [(request.versions.oldest, request.versions.current) for request in requests]
    assert versions == [(step - 2, step - 1) for step in range(1, 7)]
    masked = [row["staleness/masked"] for row in finished.metrics]
    assert max(masked) > 0
    num_tokens = 3 * sum(3 + sample for sample in range(5))  # sampled tokens of 3 groups
    for request, share in zip(requests, masked, strict=True):
        (batch,) = request.mini_batches
        assert batch.denominators.num_tokens == round(num_tokens * (1 - share))
    assert all(row["staleness/max"] <= 1 for row in finished.metrics)


def test_tokens_on_a_mixed_kv_cache_are_not_compared(tmp_path: Path) -> None:
    """With pushes in place, tokens of the last version count as such only if their request began with it."""
    tree = {"type": "grpo", "kl_loss": None}
    schedule = {"type": "async", "lookahead": 2, "max_staleness": 3}
    in_place = run(tmp_path / "in_place", tree, informative, steps=8, schedule={**schedule, "update": "in_place"})
    retract = run(tmp_path / "retract", tree, informative, steps=8, schedule=schedule)
    assert all("policy/mixed_kv" not in row for row in retract.metrics)
    shares = [row["policy/mixed_kv"] for row in in_place.metrics]
    assert max(shares) > 0
    assert shares[0] == 0
    requests = zip(
        in_place.arguments("policy", "train"), retract.arguments("policy", "train"), in_place.metrics, strict=True
    )
    num_excluded = 0
    for excluding, including, row in requests:
        assert (excluding.versions.in_place, including.versions.in_place) == (True, False)
        left_out = including.versions.num_current_tokens - excluding.versions.num_current_tokens
        assert 0 <= left_out <= round(row["policy/mixed_kv"] * 3 * sum(3 + sample for sample in range(5)))
        num_excluded += left_out
    assert num_excluded > 0


def test_clocks_of_requests_stand_still_while_engines_have_no_memory(tmp_path: Path) -> None:
    finished = run(tmp_path, {"type": "ppo"}, informative, steps=4, schedule={"type": "async"}, releases_memory=True)
    is_paused, num_released = False, 0
    for call in finished.log:
        if call.target == "clocks":
            is_paused = call.method == "pause"
        elif call.method == "release":
            assert is_paused
            num_released += 1
        elif call.target == "engines" and call.method in ("probe", "sample"):
            assert not is_paused or call.method == "sample"  # a push admits the next groups while it is paused
    assert num_released >= 4
    assert not is_paused


def test_a_loop_with_prompts_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RLRun.sample
    monkeypatch.setattr(RLRun, "sample", lambda run, prompts, **options: original(run, list(prompts), **options))
    with pytest.raises(ConfigError, match="async chooses the prompts of a step: grpo needs to pass what steps"):
        run(tmp_path, {"type": "grpo", "kl_loss": None}, informative, schedule={"type": "async"})


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda tree: "-".join(tree))
@pytest.mark.parametrize("kind", ["one_step_off", "async"])
def test_groups_on_which_rewards_failed_are_replaced(tmp_path: Path, algorithm: dict[str, Any], kind: str) -> None:
    """Of the first group of each step, one completion has a reward; of the last one of step 2, none has."""

    def script(label: str, number: int, sample: int) -> float | None:
        failed = sample > 0 if number == 0 else label.startswith("step-2") and number == 2
        return None if failed and not label.endswith("greedy") else informative(label, number, sample)

    finished = run(tmp_path, algorithm, script, steps=3, schedule={"type": kind})
    jobs = [job for job in finished.arguments("engines", "sample") if isinstance(job, GroupJob)]
    needs_group = finished.run.config.algorithm.needs_group
    trained = [
        {sample.payload for batch in request.mini_batches for sample in batch.samples}
        for request in finished.arguments("policy", "train")
    ]
    assert trained == [{0, 1, 2}] * 3, "every step trains on as many groups as without failures"
    num_failed = int(finished.metrics[-1]["schedule/failed"])
    assert num_failed >= (3 if needs_group else 1)
    assert len(jobs) >= 3 * 3 + num_failed
    assert finished.metrics[-1]["schedule/filtered"] == 0
    failed = sum(row.get("reward/match/failed", 0) for row in finished.metrics)
    assert failed >= 4 + 5
