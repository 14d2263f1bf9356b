"""Runs in which rewards fail: what is counted, and when `reward.max_failed_share` ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.reward import RewardsConfig
from megarl.errors import RewardError
from megarl.groups.group_stream import FinishedGroup
from megarl.rollout.journal.journal_folder import list_steps, step_folder
from megarl.run.reward_failures import RewardFailures
from megarl.run.run_state import RunState
from megarl.run.schedule_log import log_folder, read_log
from megarl.schedule.events import Leased
from tests.algorithms.scripted_run import FinishedRun, run_script
from tests.run.finished_groups import completion, finished_group


def group(*errors: dict[str, str]) -> FinishedGroup:
    return finished_group([completion([0, 1], reward_errors=each) for each in errors])


def failures(messages: list[str] | None = None, **config: Any) -> RewardFailures:
    terms = {"judge": {"type": "numeric"}}
    rewards = RewardsConfig.model_validate({"terms": terms, **config})
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
    with pytest.raises(RewardError, match=r"^step 1: environment failed on 1 of 8 completions, more than .* = 0 "):
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

    with pytest.raises(RewardError, match=r"^step 3: reward.terms.match failed on 6 of 6 completions, more than"):
        run_script(tmp_path, {"type": "grpo", "kl_loss": None}, script, steps=6)
    assert list_steps(tmp_path) == [1, 2], "the journal does not keep what the run could not use"


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_a_schedule_that_such_an_end_stops_loses_no_prompt(tmp_path: Path, schedule: str) -> None:
    """The service is down from step 3 on; the run that resumes trains on the prompts that it has failed on."""
    is_down = True

    def script(label: str, number: int, sample: int) -> float | None:
        return None if is_down and int(label.split("-")[1]) >= 3 else float(sample % 2)

    def train(resumed: RunState | None = None) -> FinishedRun:
        section = {"type": schedule, "max_staleness": 8} if schedule == "async" else {"type": schedule}
        tree = {"type": "grpo", "kl_loss": None}
        return run_script(tmp_path, tree, script, steps=6, resumed=resumed, schedule=section)

    with pytest.raises(RewardError, match=r"^step \d: reward.terms.match failed on \d+ of \d+ completions, more than"):
        train()
    is_down = False
    finished = train(RunState())
    assert len(finished.metrics) == 6
    assert finished.metrics[-1]["schedule/failed"] == 0
    events = list(read_log(log_folder(tmp_path / "journal")))
    trained: dict[int, tuple[int, ...]] = {event.step: event.ordinals for event in events if isinstance(event, Leased)}
    assert sorted(ordinal for ordinals in trained.values() for ordinal in ordinals) == list(range(12))


def test_a_few_failures_are_counted_and_not_trained_on(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float | None:
        return None if (number, sample) == (0, 0) else float(sample % 2)

    finished = run_script(tmp_path, {"type": "grpo", "kl_loss": None, "group_size": 4}, script, steps=2)
    assert [row["reward/match/failed"] for row in finished.metrics] == [1.0, 1.0]
    assert [row["reward/dropped"] for row in finished.metrics] == [1.0, 1.0]
    assert sum("reward.terms.match failed on 1 of 8" in text for text in finished.messages) == 1
