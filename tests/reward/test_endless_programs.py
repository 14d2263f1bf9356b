"""The term `code` and programs that use up time, memory or output: their value is 0, and no thread stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.sandbox.tiers import LocalSandbox
from tests.reward.conftest import make_scorer, make_trajectory
from tests.sandbox.local_tiers import PATIENT, best_tier, patience
from tests.time_limits import wait_until


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with patience():
        yield


def score(
    tests: list[dict[str, str]], *texts: str, limits: dict[str, Any] | None = None, **fields: Any
) -> list[Trajectory]:
    """Return the trajectories of completions that are scored by these tests; `limits` are those of the sandbox."""
    sandbox = {**PATIENT, "allow_unsafe": True} | (limits or {})
    scorer = make_scorer(tests={"type": "code", "tests_field": "tests", "sandbox": sandbox, **fields})
    prompt = Prompt(prompt_id="rows.jsonl:1", text="Q?", token_ids=(81,), row={"tests": tests})

    async def run() -> list[Trajectory]:
        group = await scorer.score([make_trajectory(f"```python\n{text}\n```") for text in texts], prompt)
        await scorer.close()
        return list(group.trajectories)

    return asyncio.run(run())


def threads_of_rewards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reward"]


MANY = [{"input": str(i), "output": "1"} for i in range(25)]
SLEEPS = "import time\ntime.sleep(6000)"


@pytest.mark.parametrize("fields", [{}, {"score": "share"}], ids=["all", "share"])
def test_programs_that_sleep_through_all_tests_score_0(fields):
    found = score(MANY, *[SLEEPS] * 5, limits={"wall_seconds": 0.2}, timeout_seconds=1.0, **fields)
    assert [(t.rewards["tests"], t.reward_errors, t.rewards["tests/timeout"]) for t in found] == [(0.0, {}, 1.0)] * 5
    assert wait_until(lambda: not threads_of_rewards())


def test_the_time_is_that_of_all_tests_together():
    source = "import time\nif int(input()) > 1: time.sleep(6000)\nprint(1)"
    (found,) = score(MANY, source, timeout_seconds=5.0, score="share")
    assert found.rewards["tests/passed"] <= 2 / 25
    assert (found.reward_errors, found.rewards["tests/timeout"]) == ({}, 1.0)


def test_the_first_failure_ends_it(monkeypatch):
    numbers = list[int]()
    run = LocalSandbox.run

    def counted(self, program, **options):
        outcomes = run(self, program, **options)
        numbers.append(len(outcomes))
        return outcomes

    monkeypatch.setattr(LocalSandbox, "run", counted)
    source = "print(1 if int(input()) != 3 else 2)"
    assert [t.rewards["tests/passed"] for t in score(MANY, source)] == [3 / 25]
    assert [t.rewards["tests/passed"] for t in score(MANY, source, score="share")] == [24 / 25]
    assert numbers == [4, 25]


ENDS = {
    "error": "1 / 0",
    "timeout": SLEEPS,
    "memory": "import os\nfor _ in range(3):\n    if os.fork() == 0: break\nx = b'x' * (40 << 20)\nwhile True: pass",
    "output": "print('x' * 10**6)",
    "killed": "import ctypes\nctypes.string_at(0)",
}


LIMITS = {"timeout": {"wall_seconds": 0.5}, "memory": {"memory_mib": 64}}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_program_is_counted_by_name(end):
    if end == "memory" and best_tier() == "unsafe":
        pytest.skip("needs a sandbox, which measures the memory of all processes together")
    (found,) = score(MANY[:1], ENDS[end], limits=LIMITS.get(end))
    assert (found.rewards["tests"], found.reward_errors) == (0.0, {})
    counted = {name.removeprefix("tests/"): value for name, value in found.rewards.items() if name != "tests"}
    assert counted.pop("passed") == 0.0
    assert [name for name, value in counted.items() if value] == [end]


def test_values_that_cost_too_much_to_compare_are_counted():
    tests = [{"call": "f()", "expected": [1]}]
    source = "def f(): return {i * (2**61 - 1) for i in range(1, 1000)}"
    (found,) = score(tests, source)
    assert (found.rewards["tests"], found.reward_errors, found.rewards["tests/undecided"]) == (0.0, {}, 1.0)


def test_output_as_long_as_the_expected_one_is_right():
    text = " ".join(map(str, range(20_000)))
    tests = [{"input": "", "output": text}]
    right = "print(*range(20_000))"
    assert [t.rewards["tests"] for t in score(tests, right, f"{right}\n{right}", "print('x' * 10**6)")] == [
        1.0,
        0.0,
        0.0,
    ]


def test_no_completion_has_metrics_that_others_lack():
    found = score(MANY[:1], "print(1)", "1 / 0")
    blank = score(MANY[:1], "", require_block=True)
    assert found[0].rewards.keys() == found[1].rewards.keys() == blank[0].rewards.keys()
