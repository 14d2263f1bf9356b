"""Schedules that cannot work are refused; the last run says which lookahead and cap an asynchronous one needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megarl.preflight.schedule_checks import MIN_OBSERVED_STEPS, find_schedule_notices, find_schedule_problems
from tests.run.finished_groups import run_config

MODEL_TERM = {"terms": {"match": {"type": "numeric"}, "judge": {"type": "model", "path": "judge"}}}


def problems(device: str | None = "cpu", algorithm: dict[str, Any] | None = None, **sections: Any) -> list[str]:
    return list(find_schedule_problems(run_config(algorithm or {}, **sections), device))


def test_engines_without_memory_cannot_drain() -> None:
    assert problems("cuda") == []
    one_step_off = {"type": "one_step_off"}
    (problem,) = problems("cuda", schedule=one_step_off)
    assert problem.startswith("schedule.update: drain waits for requests")
    assert problems("cpu", schedule=one_step_off) == problems(None, schedule=one_step_off) == []
    assert problems("cuda", schedule={"type": "async"}) == []
    pools = {"pools": {"engines": {}}, "rollout": {"pool": "engines"}}
    assert problems("cuda", schedule=one_step_off, placement=pools) == []


def test_engines_that_release_their_memory_cannot_be_updated_in_place() -> None:
    for update in ("in_place", "abort", "retract"):
        assert problems(schedule={"type": "async", "update": update}) == []
    in_place = {"type": "async", "update": "in_place"}
    (problem,) = problems("cuda", schedule=in_place)
    assert problem.startswith("schedule.update: in_place keeps the KV cache of running requests")
    pools = {"pools": {"engines": {}}, "rollout": {"pool": "engines"}}
    assert problems("cuda", schedule=in_place, placement=pools) == []
    assert problems("cuda", schedule={"type": "async", "update": "abort"}) == []


def test_a_cap_below_the_lookahead_is_refused() -> None:
    with pytest.raises(ValidationError, match="lookahead needs to be at most max_staleness, got 4 > 2"):
        run_config({}, schedule={"type": "async", "lookahead": 4, "max_staleness": 2})


@pytest.mark.parametrize("algorithm", ["dapo", "prime"])
def test_models_cannot_filter_groups(algorithm: str) -> None:
    (problem,) = problems(algorithm={"type": algorithm}, reward=MODEL_TERM, schedule={"type": "async"})
    assert "reward.terms.judge is a model" in problem
    assert problems(algorithm={"type": algorithm}, schedule={"type": "async"}) == []
    assert problems(algorithm={"type": "grpo"}, reward=MODEL_TERM, schedule={"type": "async"}) == []


def write_metrics(folder: Path, *, mean: float, slowest: float, train: float, steps: int) -> None:
    rows: list[dict[str, float]] = [{"step": 0, "eval/match": 0.5}]
    for step in range(1, steps + 1):
        warm_up = 100.0 if step == 1 else 0.0
        rows.append(
            {
                "step": step,
                "loss": 0.0,
                "rollout/generation_seconds_mean": mean + warm_up,
                "rollout/generation_seconds_max": slowest + warm_up,
                "time/rollout_seconds": slowest + warm_up,
                "time/step_seconds": slowest + warm_up + train,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_last_run_says_what_an_asynchronous_one_needs(tmp_path: Path) -> None:
    write_metrics(tmp_path, mean=10.0, slowest=45.0, train=8.0, steps=10)
    expected = (
        f"the last run in {tmp_path}: groups take 1.00 steps on average and 4.50 at most: asynchronous steps need "
        "lookahead 2 and max_staleness 5"
    )
    assert list(find_schedule_notices(run_config({}, run_dir=str(tmp_path)))) == [expected]
    narrow = {"type": "async", "lookahead": 1, "max_staleness": 2}
    first, *warnings = find_schedule_notices(run_config({}, run_dir=str(tmp_path), schedule=narrow))
    assert first == expected
    assert [warning.partition(" ")[0] for warning in warnings] == ["schedule.lookahead", "schedule.max_staleness"]


def test_a_short_run_says_nothing(tmp_path: Path) -> None:
    config = run_config({}, run_dir=str(tmp_path))
    assert list(find_schedule_notices(config)) == []
    write_metrics(tmp_path, mean=10.0, slowest=45.0, train=8.0, steps=MIN_OBSERVED_STEPS)
    assert list(find_schedule_notices(config)) == []


def test_unbounded_weights_are_noted(tmp_path: Path) -> None:
    def notices(kind: str, cap: float | None) -> list[str]:
        algorithm = {"type": "grpo", "decoupled": {"behave_cap": cap}}
        return list(find_schedule_notices(run_config(algorithm, run_dir=str(tmp_path), schedule={"type": kind})))

    (notice,) = notices("async", None)
    assert notice.startswith("algorithm.decoupled.behave_cap: null does not bound")
    assert notices("async", 2.0) == notices("sync", None) == []
