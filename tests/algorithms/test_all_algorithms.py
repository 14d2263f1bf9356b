"""Every algorithm with completions that leave the loss, and under schedules that sample ahead.

Those whose reward failed (`on_error: drop`): every algorithm behaves as if they had not been sampled. Truncated ones,
with `mask_truncated_completions`: they count in baselines and metrics, not in the policy's loss.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megarl.batch.pack import SampleKey, SampleRef
from megarl.errors import ConfigError, LimitError
from megarl.megatron.requests import TrainRequest
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.rl_run import RLRun
from tests.algorithms.scripted_run import FinishedRun, run_script
from tests.errors import expect_error

MODEL_ROLES = ("policy", "reference", "critic", "cost_critic", "reward_model", "teacher", "reward cost")
ANY_SHARE = {"max_failed_share": 1.0}
NO_KL: dict[str, Any] = {"kl_reward": None}
MATCH = {"match": {"type": "numeric"}}
COST = {"terms": {**MATCH, "cost": {"type": "model", "path": "cost"}}}
PRETRAINING = {"max_steps": 2}

KINDS = (
    *("grpo", "rloo", "dr_grpo", "gspo", "cispo", "gmpo", "dapo", "reinforce_pp", "reinforce_pp_baseline"),
    *("remax", "ppo", "pf_ppo", "safe_rlhf", "prime"),
)
ALGORITHMS: list[dict[str, Any]] = [
    *({"type": kind} for kind in KINDS),
    {"type": "grpo", "kl_loss": None, "kl_reward": {"coefficient": 0.1, "target": 0.1, "horizon": 60}},
    {"type": "vapo", "pretraining": PRETRAINING},
    {"type": "distillation", "teacher": {"path": "teacher"}},
]


def value_key(sample: SampleRef) -> SampleKey:
    """Samples of a group have different lengths; their index changes if others are left out."""
    return sample.payload, sample.num_tokens


def models() -> dict[str, dict[str, Any]]:
    fields: Any = {role: {"value_key": value_key, "offset": 0.1 * n} for n, role in enumerate(MODEL_ROLES)}
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
    parts = {name: payload.fetch() for name, payload in payloads.items()}
    return {name: {key: part[key] for part in found for key in part} for name, found in parts.items()}


def trained_on(run: FinishedRun) -> list[Any]:
    """Return all that each model was trained on, without the indices of the samples."""
    found = []
    for call in (call for call in run.log if call.method == "train"):
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
    skipped = re.compile(r"time/|controller/|tokens_per_second|.*(dropped|failed)$")
    rows = [*run.pretraining, *run.metrics]
    return [{name: value for name, value in row.items() if not skipped.match(name)} for row in rows]


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
    assert ("reward/mean" in first, "reward/mean" in second) == (False, True)
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


def trained_samples(request: TrainRequest) -> list[tuple[SampleKey, float, list[float]]]:
    """Return key and advantages of each sample, per sequence and per token."""
    columns = columns_of(request)
    (batch,) = request.mini_batches
    return [
        (s.key, s.scalars.get("advantages", 0.0), columns["advantages"][s.key].tolist() if columns else [])
        for s in batch.samples
    ]


@pytest.mark.parametrize("algorithm", MASKABLE, ids=lambda tree: tree["type"])
def test_truncated_completions_count_in_baselines_but_not_in_the_loss(algorithm: Any, tmp_path: Path) -> None:
    truncated = {"truncated": lambda label, number, sample: sample == 1}
    masked, unmasked = (
        run_script(tmp_path / str(len(fields)), algorithm | fields, half_pass, rollout_fields=truncated)
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
    with expect_error(LimitError, "2", "update", "policy"):
        run_script(tmp_path / "all", tree, half_pass, rollout_fields={"truncated": lambda *_: True}, **options)


WITHOUT_LOOKAHEAD: dict[str, Any] = {"type": "async", "lookahead": 0, "max_staleness": 0}


def informative(label: str, number: int, sample: int) -> float:
    """Rewards of which some are 0 and some 1 in every group, so that no algorithm filters a group."""
    return 0.25 if label.endswith("greedy") else float(sample % 2)


def few_fail(label: str, number: int, sample: int) -> float | None:
    """As `some_fail`, but every group has enough rewards to be trained on."""
    return informative(label, number, sample) if number else some_fail(label, number, sample)


def metrics_of(finished: FinishedRun) -> list[dict[str, float]]:
    ignored, rows = ("schedule/", "staleness/", "drift/", "policy_version/"), comparable_metrics(finished)
    return [{name: value for name, value in row.items() if not name.startswith(ignored)} for row in rows]


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
    with expect_error(LimitError, "2", "train_infer_mismatch/kl"):
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
    requests = [finished.arguments("policy", "train") for finished in (in_place, retract)]
    num_excluded = 0
    for excluding, including, row in zip(*requests, in_place.metrics, strict=True):
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
    with expect_error(ConfigError, "chooses", "prompts"):
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
