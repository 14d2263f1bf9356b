"""Terms that fail: called once more for the completions that they failed on, and never replaced by a number."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from megarl.batch.scored_group import ScoredGroup
from megarl.batch.trajectory import Prompt
from megarl.config.reward import RewardsConfig
from megarl.errors import RewardError
from megarl.reward.reward_scorer import RewardScorer
from tests.reward.conftest import decode, make_trajectory
from tests.virtual_time import run_in_virtual_time

TIMEOUT = 0.2

FAILURES = {
    "raises": ConnectionError("the service is down"),
    "nan": float("nan"),
    "infinite": {"reward": float("inf")},
    "nothing": None,
    "hangs": "hang",
}
"""By a completion's first word: what goes wrong."""


class Service:
    """Fails on a completion `<failure> <number>` in its first `<number>` calls, and then returns its length."""

    calls: ClassVar[Counter[str]] = Counter()

    async def score(self, trajectory: Any, text: str, row: Any) -> Any:
        self.calls[text] += 1
        kind, num_failures = text.split()
        if self.calls[text] <= int(num_failures):
            failure = FAILURES[kind]
            if isinstance(failure, Exception):
                raise failure
            if failure == "hang":
                await asyncio.sleep(10 * TIMEOUT)
            return failure
        return float(len(text))


class GroupService:
    """Sees all completions of a prompt; fails on all of them in its first call, or on the texts in `bad`."""

    calls: ClassVar[list[list[str]]] = []
    bad: ClassVar[list[list[str]]] = []

    async def score(self, trajectories: Any, texts: list[str], row: Any) -> Any:
        self.calls.append(list(texts))
        bad = self.bad[len(self.calls) - 1]
        if bad == ["all"]:
            raise ConnectionError("the service is down")
        return [None if text in bad else float(len(text)) + 100 * len(self.calls) for text in texts]


@pytest.fixture(autouse=True)
def forget_calls() -> None:
    Service.calls.clear()
    GroupService.calls.clear()


def score(prompt: Prompt, texts: Sequence[str], path: str = "Service", **fields: Any) -> ScoredGroup:
    term = {"type": "python", "path": f"{__name__}:{path}", "timeout_seconds": TIMEOUT, **fields}
    scorer = RewardScorer(RewardsConfig.model_validate({"terms": {"service": term}}), decode)
    return run_in_virtual_time(scorer.score([make_trajectory(text) for text in texts], prompt))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_completion_is_scored_once_more(prompt: Prompt, failure: str) -> None:
    scored = score(prompt, [f"{failure} 0", f"{failure} 1"])
    assert [t.reward_errors for t in scored.trajectories] == [{}, {}]
    assert [t.reward for t in scored.trajectories] == [len(failure) + 2.0] * 2
    assert Service.calls == {f"{failure} 0": 1, f"{failure} 1": 2}, "only the failed one is called again"
    assert scored.terms["service"].num_retried == 1


@pytest.mark.parametrize("failure", FAILURES)
def test_a_completion_that_fails_twice_has_an_error_and_no_value(prompt: Prompt, failure: str) -> None:
    good, bad = score(prompt, [f"{failure} 0", f"{failure} 2"]).trajectories
    assert (good.reward, good.reward_errors) == (len(failure) + 2.0, {})
    assert (bad.rewards, set(bad.reward_errors)) == ({}, {"service"})
    assert bad.reward_errors["service"].startswith(f"reward.terms.service ({__name__}:Service) ")
    assert Service.calls[f"{failure} 2"] == 2
    with pytest.raises(RewardError, match=r"^reward.terms.service "):
        score(prompt, [f"{failure} 4"], on_error="raise")


def test_a_term_that_compares_completions_sees_all_of_them_again(prompt: Prompt) -> None:
    GroupService.bad = [["a"], []]
    scored = score(prompt, ["a", "bb", "ccc"], "GroupService", per="group")
    assert GroupService.calls == [["a", "bb", "ccc"]] * 2
    assert [t.reward for t in scored.trajectories] == [201.0, 102.0, 103.0], "values of the first call stay"
    assert scored.terms["service"].num_retried == 1


def test_a_group_that_fails_twice_has_no_values(prompt: Prompt) -> None:
    GroupService.bad = [["all"], ["all"]]
    scored = score(prompt, ["a", "bb"], "GroupService", per="group")
    assert all("the service is down" in t.reward_errors["service"] for t in scored.trajectories)
    assert len(GroupService.calls) == 2


def test_seconds_of_a_term_include_its_second_call(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: asyncio.get_running_loop().time())
    assert score(prompt, ["hangs 0", "hangs 2"]).terms["service"].seconds == pytest.approx(2 * TIMEOUT)
    assert score(prompt, ["raises 0"]).terms["service"].num_retried == 0
