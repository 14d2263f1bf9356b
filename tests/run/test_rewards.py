"""Rewards of a run: weights that change during it, and failures, with the share of them that ends it."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megarl.batch.trajectory import TermReport, Trajectory
from megarl.config.reward import RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.rollout.journal import list_steps, step_folder
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.reward_weights import FILE, RewardFailures, RewardWeights, parse_weights, request_weights
from megarl.run.rollout_batch import RolloutBatch, term_metrics
from megarl.run.run_logs import log_folder, read_log
from megarl.run.run_state import RunState
from megarl.run.schedule.events import Leased
from tests.algorithms.scripted_run import FinishedRun, run_script
from tests.algorithms.test_all_algorithms import trained_on
from tests.errors import expect_error
from tests.run.finished_groups import completion, finished_group, run_config

TERMS = {"terms": {"match": {"type": "numeric"}, "style": {"type": "format", "weight": 0.5}}}


def config(folder: Path, **sections: Any) -> Any:
    return run_config({"type": "grpo"}, run_dir=str(folder), **{"reward": TERMS, **sections})


def begin(weights: RewardWeights, *steps: int) -> list[dict[str, float]]:
    """Return the weights of the steps."""
    found = []
    for step in steps:
        weights.begin_step(step)
        found.append(dict(weights.current))
    return found


BASE, CHANGED = {"match": 1.0, "style": 0.5}, {"match": 1.0, "style": 0.25}


def test_a_change_takes_effect_in_the_next_step(tmp_path: Path) -> None:
    weights = RewardWeights(config(tmp_path), {})
    assert weights.begin_step(1) == {}
    request_weights(tmp_path, {"style": 0.25})
    assert weights.current == BASE, "the step that has begun keeps its weights"
    assert weights.begin_step(2) == {"style": 0.25}
    assert weights.begin_step(3) == {}
    assert weights.current == CHANGED
    lines = [json.loads(line) for line in (tmp_path / "journal" / FILE).read_text().splitlines()]
    assert lines == [
        {"step": 1, "weights": BASE},
        {"requested": {"style": 0.25}},
        {"step": 2, "weights": CHANGED},
        {"step": 3, "weights": CHANGED},
    ]


def test_steps_that_are_trained_again_have_their_weights(tmp_path: Path) -> None:
    killed = RewardWeights(config(tmp_path), {})
    begin(killed, 1, 2)
    request_weights(tmp_path, {"style": 0.25})
    begin(killed, 3, 4)
    request_weights(tmp_path, {"match": 2.0})  # the run is killed before step 5
    written = (tmp_path / "journal" / FILE).read_bytes()
    for checkpoint in (0, 2, 3, 4):
        at_checkpoint = {0: {}, 2: BASE}.get(checkpoint, CHANGED)
        again = RewardWeights(config(tmp_path), at_checkpoint, writes=False)
        expected = [BASE, BASE, CHANGED, CHANGED, {**CHANGED, "match": 2.0}]
        assert begin(again, *range(checkpoint + 1, 6)) == expected[checkpoint:]
    assert (tmp_path / "journal" / FILE).read_bytes() == written


def test_a_change_during_steps_that_are_trained_again_waits_for_a_new_one(tmp_path: Path) -> None:
    begin(RewardWeights(config(tmp_path), {}), 1, 2, 3)
    again = RewardWeights(config(tmp_path), {})
    begin(again, 1)
    request_weights(tmp_path, {"style": 0.25})
    assert begin(again, 2, 3, 4) == [BASE, BASE, CHANGED]


def test_the_checkpoint_has_the_weights_if_the_file_is_lost(tmp_path: Path) -> None:
    assert begin(RewardWeights(config(tmp_path), CHANGED), 7) == [CHANGED]


def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    begin(RewardWeights(config(tmp_path), {}), 1)
    path = tmp_path / "journal" / FILE
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole + whole[:length])
        request_weights(tmp_path, {"style": 0.25})
        assert begin(RewardWeights(config(tmp_path), {}, writes=False), 1, 2) == [BASE, CHANGED]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("style", "needs reward.terms.NAME.weight=VALUE, as other keys cannot change during a run, got 'style'"),
        ("trainer.optimizer.lr=1", "needs reward.terms.NAME.weight=VALUE, as other keys cannot change"),
        ("reward.terms.style.pattern=x", "needs reward.terms.NAME.weight=VALUE, as other keys cannot change"),
        ("reward.terms.x.weight=1", "reward.terms.x.weight: needs a term of the run's reward, one of match, style"),
        *(
            (f"reward.terms.style.weight={value}", f"reward.terms.style.weight: needs a finite number, got '{value}'")
            for value in ("", "high", "nan", "true", "[")
        ),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^--set " + re.escape(message)):
        parse_weights(config(tmp_path), ["reward.terms.match.weight=2", setting])


def test_valid_settings(tmp_path: Path) -> None:
    settings = ["reward.terms.match.weight=2", "reward.terms.style.weight=-0.1", "reward.terms.match.weight=1e-3"]
    assert parse_weights(config(tmp_path), settings) == {"match": 0.001, "style": -0.1}
    costs = {"terms": {**TERMS["terms"], "cost": {"type": "model", "path": "cost"}}}
    safe = run_config({"type": "safe_rlhf", "cost_term": "cost"}, reward=costs)
    with expect_error(ConfigError, "run's", "'cost'"):
        parse_weights(safe, ["reward.terms.cost.weight=2"])


CHANGE_AT, NEW_WEIGHT = 3, -2.0


def train(folder: Path, algorithm: str, *, resumed: RunState | None = None, **sections: Any) -> FinishedRun:
    """Train 6 steps; the weight is changed while step 2 is sampled, so that step 3 is the first one with it."""
    is_requested = resumed is not None

    def script(label: str, number: int, sample: int) -> float:
        nonlocal is_requested
        if label == f"step-{CHANGE_AT - 1}" and not is_requested:
            is_requested = True
            request_weights(folder, {"match": NEW_WEIGHT})
        return 1.0 + (number + sample) % 3

    return run_script(folder, {"type": algorithm, "kl_loss": None}, script, steps=6, resumed=resumed, **sections)


@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
def test_rewards_have_the_weights_of_the_step_that_trains_on_them(tmp_path: Path, schedule: str) -> None:
    """A schedule samples groups of later steps before the change, and trains on them with the new weight."""
    finished = train(tmp_path, "dr_grpo", schedule={"type": schedule})
    weights = [row["reward/match/weight"] for row in finished.metrics]
    first = weights.index(NEW_WEIGHT) + 1
    assert first == CHANGE_AT if schedule == "sync" else 1 < first <= 6
    assert weights == [1.0] * (first - 1) + [NEW_WEIGHT] * (7 - first)
    for row, weight in zip(finished.metrics, weights, strict=True):
        assert row["reward/mean"] == pytest.approx(weight * row["reward/match"], rel=1e-12)
    (message,) = (text for text in finished.messages if "weight" in text)
    assert message == f"step {first}: reward.terms.match.weight is -2 from now on, was 1"


def test_advantages_change_from_that_step_on_and_repeat_bitwise(tmp_path: Path) -> None:
    changed = trained_on(train(tmp_path / "changed", "dr_grpo"))
    constant = trained_on(train(tmp_path / "constant", "dr_grpo", resumed=RunState()))
    assert [a == b for a, b in zip(changed, constant, strict=True)] == [True] * 2 + [False] * 4
    again = trained_on(train(tmp_path / "changed", "dr_grpo", resumed=RunState()))
    assert again == changed
    from_checkpoint = RunState(step=4, policy_version=4, reward_weights={"match": NEW_WEIGHT})
    resumed = train(tmp_path / "elsewhere", "dr_grpo", resumed=from_checkpoint)
    assert [row["reward/match/weight"] for row in resumed.metrics] == [NEW_WEIGHT] * 2


def test_filters_see_the_weights_of_their_step(tmp_path: Path) -> None:
    """PRIME keeps groups in which some rewards are positive; with a negative weight, none is."""

    def script(label: str, number: int, sample: int) -> float:
        if (label, number, sample) == ("step-1", 0, 0):
            request_weights(tmp_path, {"match": -1.0})
        return float(sample)

    finished = run_script(tmp_path, {"type": "prime"}, script, steps=2)
    assert [row["prime/kept_groups"] for row in finished.metrics] == [2, 0]


def test_metrics_of_terms(tmp_path: Path) -> None:
    """Lengths are 3, 4 and 5 tokens; rewards grow with them."""
    row = run_script(tmp_path, {"type": "dr_grpo", "kl_loss": None}, lambda *a: 2.0 * a[2]).metrics[0]
    assert row["reward/match/share"] == 1.0
    assert row["reward/match/length_correlation"] == pytest.approx(1.0)
    constant = run_script(tmp_path / "b", {"type": "dr_grpo", "kl_loss": None}, lambda *_: 0.0).metrics[0]
    assert not {"reward/match/share", "reward/match/length_correlation"} & constant.keys()


def test_metrics_of_terms_that_not_all_completions_have() -> None:
    def scored(length: int, **rewards: float) -> Trajectory:
        return completion([0] + [1] * length, rewards=rewards)

    def timed(seconds: float, *scored: Trajectory) -> FinishedGroup:
        group, terms = finished_group(scored), {"a": TermReport(seconds=seconds, num_retried=0)}
        return replace(group, summary=replace(group.summary, terms=terms))

    first = timed(1.0, scored(1, a=1.0, b=4.0), scored(2, a=2.0, b=0.0))
    second = timed(4.0, scored(3, a=6.0), scored(4, a=5.0), scored(5, a=9.0))
    metrics = term_metrics(RolloutBatch.from_sampled([first, second]), {"a": -0.5, "b": 2.0})
    assert metrics == {
        "reward/a/weight": -0.5,
        "reward/b/weight": 2.0,
        "reward/a/seconds_mean": 2.5,
        "reward/a/seconds_max": 4.0,
        "reward/a/share": pytest.approx(0.5 * 23 / (0.5 * 23 + 2 * 4)),
        "reward/b/share": pytest.approx(8 / (0.5 * 23 + 2 * 4)),
        "reward/a/length_correlation": pytest.approx(statistics.correlation([1, 2, 6, 5, 9], [1, 2, 3, 4, 5])),
        "reward/b/length_correlation": pytest.approx(-1.0),
    }


def totals(folder: Path, *scored: Mapping[str, float], weights: Mapping[str, float]) -> tuple[list[float], list[Any]]:
    """Return the totals and the errors of completions with these terms."""
    group = finished_group([completion([0, 1], reward=7.0, rewards=terms) for terms in scored])
    summary = RewardWeights(config(folder), weights).sum_up(group).summary
    return list(summary.column("reward")), list(summary.column("reward_errors"))


def test_a_total_is_the_sum_of_the_terms_that_a_completion_has(tmp_path: Path) -> None:
    scored = ({"match": 1.0, "style": 3.0, "style/length": 9.0}, {"match": 0.5}, {"style": 2.0, "cost": 4.0})
    assert totals(tmp_path, *scored, weights={"style": -0.5}) == ([-0.5, 0.5, -1.0], [{}] * 3)
    tenths = {name: 0.1 * n for n, name in enumerate("abcde", 1)}
    weights = {name: 1 / n for n, name in enumerate("abcde", 3)}
    expected = sum(Fraction(weights[name]) * Fraction(value) for name, value in tenths.items())
    (total,), _ = totals(tmp_path, tenths, weights=weights)
    assert total == pytest.approx(float(expected), rel=1e-15)


def test_a_total_beyond_all_rewards_is_a_failure_of_the_largest_term(tmp_path: Path) -> None:
    scored = {"match": 3.0, "style": -6e17}
    message = "reward.terms.style: its weight makes -1.2e+18 of its value, beyond 1e+18"
    assert totals(tmp_path, scored, weights={"style": 2.0}) == ([0.0], [{"style": message}])
    assert totals(tmp_path, scored, weights={"style": 1.0}) == ([pytest.approx(-6e17)], [{}])
    (infinite,), (errors,) = totals(tmp_path, {"match": 1e10}, weights={"match": 1e300})
    assert (infinite, set(errors)) == (0.0, {"match"})


ONE_TERM: dict[str, Any] = {"terms": {"match": {"type": "numeric"}}}


@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
def test_totals_that_a_changed_weight_makes_too_large_are_not_trained_on(tmp_path: Path, schedule: str) -> None:
    requests: list[str] = []

    def script(label: str, number: int, sample: int) -> float:
        if not requests:
            request_weights(tmp_path, {"match": 1e18})
        requests.append(label)
        return 2.0 if sample == 0 else float(sample % 2) / 2

    finished = run_script(
        tmp_path,
        {"type": "grpo", "kl_loss": None, "group_size": 4},
        script,
        steps=6,
        schedule={"type": schedule},
        reward={**ONE_TERM, "max_failed_share": 0.5},
    )
    last = finished.metrics[-1]
    assert last["reward/match/weight"] == 1e18
    assert (last["reward/match/failed"], last["reward/dropped"]) == (2.0, 2.0), "one of each group of 4"
    assert last["reward/mean"] == pytest.approx(1e18 / 3)


def test_a_reward_model_whose_part_is_too_large_drops_the_completion(tmp_path: Path) -> None:
    """The score of one completion in four is 3, and its weight 1e18."""
    model = {"quality": {"type": "model", "path": "rm", "weight": 1e18}}
    finished = run_script(
        tmp_path,
        {"type": "grpo", "kl_loss": None, "group_size": 4},
        lambda *_: 1.0,
        steps=1,
        reward={"terms": {**ONE_TERM["terms"], **model}, "max_failed_share": 0.5},
        models={"reward quality": {"score": lambda key: 3.0 if key[1] == 2 else 0.25 * key[1]}},
    )
    (row,) = finished.metrics
    assert (row["reward/quality/failed"], row["reward/dropped"]) == (2.0, 2.0)
    assert row["reward/mean"] == pytest.approx(1e18 / 3)
    assert trained_on(finished)


def group(*errors: dict[str, str]) -> FinishedGroup:
    return finished_group([completion([0, 1], reward_errors=each) for each in errors])


def failures(messages: list[str] | None = None, **config: Any) -> RewardFailures:
    rewards = RewardsConfig.model_validate({"terms": {"judge": {"type": "numeric"}}, **config})
    return RewardFailures(rewards, 8, (messages if messages is not None else []).append)


def test_failures_are_counted_by_the_name_of_what_failed() -> None:
    counts = failures()
    counts.add([group({}, {"judge": "down"}), group({"judge": "down", "environment": "reset failed"}, {})])
    assert counts.metrics() == {"reward/judge/failed": 2.0, "reward/environment/failed": 1.0}
    counts.begin_step()
    assert counts.metrics() == {}


def test_the_share_is_one_of_the_completions_of_the_step() -> None:
    counts = failures(max_failed_share=0.25)
    counts.add([group({"judge": "down"}, {"judge": "later"})])  # the first two of at least eight completions
    counts.check(3)
    counts.add([group({}, {}, {"judge": "down"}, {}, {}, {}, {}, {}, {}, {})])  # three of twelve
    counts.check(3)
    counts.add([group({"judge": "down"})])
    message = r"^step 3: reward.terms.judge failed on 4 of 13 completions, .* = 0.25 allows; the first error: down$"
    with pytest.raises(RewardError, match=message):
        counts.check(3)
    counts = failures(max_failed_share=0)
    counts.add([group({"environment": "reset failed"})])
    with expect_error(RewardError, "1", "8", "= 0", "environment", "completions"):
        counts.check(1)


def test_the_first_failure_of_a_term_is_reported_once() -> None:
    messages: list[str] = []
    counts = failures(messages)
    for step in (1, 2):
        counts.begin_step()
        counts.add([group({"judge": f"down in step {step}"})])
        counts.check(step)
    (message,) = messages
    assert message.startswith("step 1: reward.terms.judge failed on 1 of 8 completions, which are not trained on; ")
    assert message.endswith("reward/judge/failed counts them from now on; the first error: down in step 1")


def test_a_service_that_is_down_ends_the_run_and_its_groups_are_sampled_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        step_folder(tmp_path / "journal", step).mkdir(parents=True)

    def script(label: str, number: int, sample: int) -> float | None:
        return None if label == "step-3" else float(sample % 2)

    with expect_error(RewardError, "3", "reward.terms.match", "6"):
        run_script(tmp_path, {"type": "grpo", "kl_loss": None}, script, steps=6)
    assert list_steps(tmp_path) == [1, 2], "the journal does not keep what the run could not use"


@pytest.mark.parametrize("schedule", [{"type": "one_step_off"}, {"type": "async", "max_staleness": 8}], ids=str)
def test_a_schedule_that_such_an_end_stops_loses_no_prompt(tmp_path: Path, schedule: dict[str, Any]) -> None:
    """The service is down from step 3 on; the run that resumes trains on the prompts that it has failed on."""
    is_down = True

    def script(label: str, number: int, sample: int) -> float | None:
        return None if is_down and int(label.split("-")[1]) >= 3 else float(sample % 2)

    def train_once(resumed: RunState | None = None) -> FinishedRun:
        options: dict[str, Any] = {"steps": 6, "resumed": resumed, "schedule": schedule}
        return run_script(tmp_path, {"type": "grpo", "kl_loss": None}, script, **options)

    with expect_error(RewardError, "reward.terms.match"):
        train_once()
    is_down = False
    finished = train_once(RunState())
    assert len(finished.metrics) == 6
    assert finished.metrics[-1]["schedule/failed"] == 0
    events = list(read_log(log_folder(tmp_path / "journal")))
    trained: dict[int, tuple[int, ...]] = {event.step: event.ordinals for event in events if isinstance(event, Leased)}
    assert sorted(ordinal for ordinals in trained.values() for ordinal in ordinals) == list(range(12))


def test_a_few_failures_are_counted_and_not_trained_on(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float | None:
        return None if (number, sample) == (0, 0) else float(sample % 2)

    finished = run_script(tmp_path, {"type": "grpo", "kl_loss": None, "group_size": 4}, script, steps=2)
    assert [(row["reward/match/failed"], row["reward/dropped"]) for row in finished.metrics] == [(1.0, 1.0)] * 2
    assert sum("reward.terms.match failed on 1 of 8" in text for text in finished.messages) == 1
