"""Groups are kept by their pass rate, and solved prompts are retired, in the loops of the algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megarl.errors import DataError
from tests.algorithms.scripted_run import FinishedRun, SampleCall, run_script
from tests.run.finished_groups import run_config


def first_is_solved(label: str, number: int, sample: int) -> float:
    """All samples of the first prompt of a call pass, and one of three of the second."""
    return 1.0 if number == 0 or sample == 0 else 0.0


def num_trained(finished: FinishedRun) -> list[int]:
    return [len(request.payloads) for request in finished.arguments("policy", "train")]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "reinforce_pp"])
def test_solved_groups_are_replaced_by_further_batches(tmp_path: Path, algorithm: str) -> None:
    difficulty = {"max_pass_rate": 0.9}
    finished = run_script(tmp_path, {"type": algorithm}, first_is_solved, steps=2, data={"difficulty": difficulty})
    assert num_trained(finished) == [2, 2]
    calls: list[SampleCall] = finished.arguments("engines", "sample")
    assert [call.prompts for call in calls] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5"), ("p6", "p7")]
    assert finished.metrics[-1]["difficulty/pass_rate"] == pytest.approx((1 + 1 / 3) / 2)
    assert finished.metrics[-1]["difficulty/kept"] == 0.5


@pytest.mark.parametrize(
    ("difficulty", "expected"),
    [
        ({"min_pass_rate": 0.2, "max_pass_rate": 0.9, "max_batches": 1}, [1, 1]),
        ({"min_pass_rate": 0.5, "max_pass_rate": 0.6, "max_batches": 2}, []),
    ],
)
def test_a_step_trains_on_fewer_groups_after_the_last_batch_or_skips_the_update(
    tmp_path: Path, difficulty: dict[str, float], expected: list[int]
) -> None:
    finished = run_script(tmp_path, {"type": "grpo"}, first_is_solved, steps=2, data={"difficulty": difficulty})
    assert num_trained(finished) == expected
    assert len(finished.metrics) == 2


def test_an_asynchronous_schedule_replaces_single_groups(tmp_path: Path) -> None:
    schedule = {"type": "async", "lookahead": 1, "max_staleness": 2}
    data = {"difficulty": {"max_pass_rate": 0.9}}
    finished = run_script(tmp_path, {"type": "grpo"}, first_is_solved, steps=3, data=data, schedule=schedule)
    assert num_trained(finished) == [2, 2, 2]
    assert finished.metrics[-1]["schedule/filtered"] >= 4


def test_retired_prompts_are_not_sampled_again_and_resume_knows_them(tmp_path: Path) -> None:
    """Every second of 100 prompts is solved at once; two prompts a step."""
    data = {"difficulty": {"retire_after": 1}}
    finished = run_script(tmp_path, {"type": "grpo"}, first_is_solved, steps=52, data=data)
    calls: list[SampleCall] = finished.arguments("engines", "sample")
    assert [call.prompts for call in calls[-2:]] == [("p1", "p3"), ("p5", "p7")]
    assert finished.metrics[-1]["difficulty/retired"] == 52
    resumed = run_script(tmp_path, {"type": "grpo"}, first_is_solved, steps=53, data=data, resumed=finished.run.state())
    assert resumed.arguments("engines", "sample")[0].prompts == ("p9", "p11")


def test_a_prompt_with_a_failure_starts_to_count_again(tmp_path: Path) -> None:
    def solved_in_every_second_epoch(label: str, number: int, sample: int) -> float:
        return 0.0 if 50 < int(label.split("-")[1]) <= 100 and number == 0 else 1.0

    data = {"difficulty": {"retire_after": 2}}
    finished = run_script(tmp_path, {"type": "grpo"}, solved_in_every_second_epoch, steps=126, data=data)
    calls: list[SampleCall] = finished.arguments("engines", "sample")
    # in the third epoch p1 and all others with an odd number are retired, in the fourth nothing else yet
    assert calls[100].prompts == calls[125].prompts == ("p0", "p2")


def test_a_run_without_prompts_ends(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompt is left to sample, all 100 are retired"):
        run_script(tmp_path, {"type": "grpo"}, lambda *_: 1.0, steps=52, data={"difficulty": {"retire_after": 1}})


@pytest.mark.parametrize(
    ("algorithm", "difficulty", "sections", "message"),
    [
        ("grpo", {"min_pass_rate": 0.9, "max_pass_rate": 0.5}, {}, "min_pass_rate needs to be at most max_pass_rate"),
        ("grpo", {"term": "taste"}, {}, "term needs the name of a rule of reward.terms, ['match'], got"),
        ("grpo", {"retire_after": 1}, {"schedule": {"type": "async"}}, "retire_after needs schedule.type: sync"),
        ("remax", {}, {}, "data.difficulty: with schedule.type: sync, remax samples the greedy completions"),
    ],
)
def test_bad_settings_are_refused(
    algorithm: str, difficulty: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        run_config({"type": algorithm}, data={"path": "x.jsonl", "difficulty": difficulty}, **sections)
    assert message in str(refused.value)
