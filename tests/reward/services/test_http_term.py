"""The term `http` with a service that fails, hangs, is slow, down, or answers nonsense."""

from __future__ import annotations

import asyncio
import datetime
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
from httpx import Response

from megarl.batch.scored_group import ScoredGroup
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.reward import RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.reward_scorer import RewardScorer
from megarl.run.reward_failures import RewardFailures
from tests.reward.conftest import decode, make_trajectory
from tests.reward.services.local_service import URL, Faults, LocalService
from tests.run.finished_groups import finished_group
from tests.time_limits import UNREACHED_SECONDS

FAST = {"backoff_seconds": 0.01, "timeout_seconds": 0.25, "breaker": {"failures": 5, "cooldown_seconds": 0.05}}
PATIENT = {"timeout_seconds": UNREACHED_SECONDS}


def lengths(body: Any) -> list[float]:
    return [float(len(item["completion"])) for item in body["completions"]]


def prompt(number: int) -> Prompt:
    return Prompt(prompt_id=f"a.jsonl:{number}", text=f"Q{number}", token_ids=(1,), row={"n": number}, answer="7")


async def run_with(work: Callable[[RewardScorer], Awaitable[Any]], url: str, **fields: Any) -> Any:
    """Create a scorer with the term `judge` of type http, and return the result of `work`."""
    config = RewardsConfig.model_validate({"terms": {"judge": {"type": "http", "url": url, **FAST, **fields}}})
    scorer = RewardScorer(config, decode)
    try:
        return await work(scorer)
    finally:
        await scorer.close()


def run(service: LocalService, work: Callable[[RewardScorer], Awaitable[Any]], **fields: Any) -> Any:
    return service.run(partial(run_with, work, f"{URL}/score", **fields))


def score(service: LocalService, texts: Sequence[str], **fields: Any) -> list[Trajectory]:
    async def work(scorer: RewardScorer) -> ScoredGroup:
        return await scorer.score([make_trajectory(text) for text in texts], prompt(1))

    return run(service, work, **fields).trajectories


async def score_groups(scorer: RewardScorer, num_groups: int, size: int) -> list[list[Trajectory]]:
    """Score groups at once whose completions all have different lengths."""
    groups = [[make_trajectory("x" * (size * g + i + 1)) for i in range(size)] for g in range(num_groups)]
    scored = await asyncio.gather(*(scorer.score(group, prompt(g)) for g, group in enumerate(groups)))
    return [each.trajectories for each in scored]


def test_faults_of_the_service_change_no_score() -> None:
    """Of the requests, 20 % fail, 5 % hang and 10 % are slow."""
    service = LocalService(lengths, Faults(error=0.2, hang=0.05, slow=0.1))

    scored = run(
        service,
        partial(score_groups, num_groups=60, size=8),
        max_batch_size=4,
        max_concurrent_requests=8,
        max_retries=6,
    )
    rewards = [trajectory.reward for group in scored for trajectory in group]
    assert rewards == [float(n) for n in range(1, 481)], "every score is that of its completion, and none is 0"
    assert not any(trajectory.reward_errors for group in scored for trajectory in group)
    assert service.kinds["error"] >= 20
    assert service.kinds["hang"] >= 3
    assert service.kinds["slow"] >= 8
    assert service.max_concurrent == 8


def test_batches_hold_completions_of_all_groups() -> None:
    service = LocalService(lengths)

    run(service, partial(score_groups, num_groups=6, size=4), max_batch_size=10)
    assert sorted(len(body["completions"]) for body in service.requests) == [4, 10, 10]
    assert len({item["prompt_id"] for item in service.requests[0]["completions"]}) == 3


def test_a_request_has_prompt_completion_row_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    service = LocalService(lambda body: [{"reward": 2, "length": 3.5}])

    async def work(scorer: RewardScorer) -> ScoredGroup:
        row = {"n": 1, "day": datetime.date(2026, 1, 2)}
        asked = Prompt(prompt_id="a.jsonl:1", text="Q1", token_ids=(1,), row=row, answer="7")
        return await scorer.score([make_trajectory("yes", finish_reason="length")], asked)

    async def main() -> ScoredGroup:
        async with service.serve() as address:
            return await run_with(work, f"{address}/score", api_key_env="REWARD_KEY", **PATIENT)

    (scored,) = asyncio.run(main()).trajectories
    assert scored.rewards == {"judge": 2.0, "judge/length": 3.5}
    sent = {"prompt_id": "a.jsonl:1", "prompt": "Q1", "completion": "yes", "finish_reason": "length", "answer": "7"}
    assert service.requests == [{"completions": [sent | {"row": {"n": 1, "day": "2026-01-02"}}]}]
    assert service.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: [1.0] * 3, ": the service needs to answer with 1 results, one per completion, got 3"),
        (lambda body: [], ": the service needs to answer with 1 results, one per completion, got 0"),
        (lambda body: {"a": 1}, ": the service needs to answer with a list of 1 results, got dict {'a': 1}"),
        (lambda body: Response(200, text="[NaN]"), " returned nan, not a finite number,"),
        (lambda body: [{"length": 2.0}], " returned a mapping without the key 'reward', but ['length'],"),
        (lambda body: ["2"], " returned str '2', not a number,"),
        (lambda body: Response(200, text="soon"), ": the service's answer needs to be JSON, got 'soon'"),
        (lambda body: Response(401, text="?"), ": the service refused the request with status 401: '?'"),
        (lambda body: Response(503), ": the service answered with status 503 (attempt 2 of 2)"),
    ],
)
def test_an_answer_that_is_no_score_is_a_failure_that_names_term_and_url(answer: Any, message: str) -> None:
    service = LocalService(answer)
    (scored,) = score(service, ["bb"], max_retries=1)
    label = f"reward.terms.judge (http, {URL}/score)"
    assert scored.reward_errors == {"judge": f"{label}{message} on a.jsonl:1, completion 'bb'"}
    assert scored.rewards == {}


def test_a_service_that_hangs_is_named_with_its_timeout() -> None:
    (scored,) = score(LocalService(lengths, Faults(hang=1.0)), ["a"], max_retries=0, timeout_seconds=0.05)
    assert "the service took longer than timeout_seconds = 0.05 (attempt 1 of 1)" in scored.reward_errors["judge"]


def test_a_batch_that_is_refused_is_split_so_that_the_others_have_scores() -> None:
    def answer(body: Any) -> Any:
        too_long = any(len(item["completion"]) > 3 for item in body["completions"])
        return Response(413, text="too long") if too_long else lengths(body)

    scored = score(LocalService(answer), ["a", "bb", "xxxx", "ccc", "d"])
    assert [t.reward for t in scored] == [1.0, 2.0, 0.0, 3.0, 1.0]
    assert [bool(t.reward_errors) for t in scored] == [False, False, True, False, False]
    assert "refused the request with status 413: 'too long'" in scored[2].reward_errors["judge"]


def test_a_dead_service_opens_the_breaker_and_ends_the_run() -> None:
    service = LocalService(lambda body: Response(503))
    limits = {"max_batch_size": 1, "max_concurrent_requests": 4, "max_retries": 2}
    scored = run(service, partial(score_groups, num_groups=16, size=4), **limits)
    assert all(t.reward_errors for group in scored for t in group), "no completion has a reward"
    num_attempts = 64 * 2 * 3
    assert len(service.requests) < num_attempts / 2, "most requests were held back"
    failures = RewardFailures(RewardsConfig.model_validate({"terms": {"judge": {}}}), 64, print)
    failures.add([finished_group(group, g) for g, group in enumerate(scored)])
    with pytest.raises(RewardError, match=r"^step 5: reward.terms.judge failed on 64 of 64 completions, more than rew"):
        failures.check(5)


def test_a_service_that_comes_back_while_requests_are_held_back_scores_them() -> None:
    def answer(body: Any) -> Any:
        return Response(503) if len(service.requests) <= 8 else lengths(body)

    service = LocalService(answer)
    scored = score(service, ["a", "bb", "ccc"], max_batch_size=1, max_retries=6)
    assert [t.reward for t in scored] == [1.0, 2.0, 3.0]


def test_a_canceled_group_does_not_cancel_the_requests_of_others() -> None:
    service = LocalService(lengths, Faults(slow=1.0))

    async def work(scorer: RewardScorer) -> list[Trajectory]:
        first = asyncio.create_task(scorer.score([make_trajectory("a")], prompt(1)))
        second = asyncio.create_task(scorer.score([make_trajectory("bb")], prompt(2)))
        await asyncio.sleep(0.06)
        first.cancel()
        return (await second).trajectories

    (scored,) = run(service, work)
    assert scored.reward == 2.0
    assert len(service.requests) == 1


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    async def work(scorer: RewardScorer) -> ScoredGroup:
        return await scorer.score([make_trajectory("a")], prompt(1))

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        (scored,) = asyncio.run(run_with(work, url, max_retries=1, **PATIENT)).trajectories
    assert "the service cannot be reached: ConnectError" in scored.reward_errors["judge"]


def test_invalid_configurations_name_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT_KEY", raising=False)
    with pytest.raises(ValueError, match="url needs to begin with http:// or https://, got 'judge:80'"):
        RewardsConfig.model_validate({"terms": {"a": {"type": "http", "url": "judge:80"}}})
    term = {"type": "http", "url": "http://x", "api_key_env": "ABSENT_KEY"}
    config = RewardsConfig.model_validate({"terms": {"a": term}})
    with pytest.raises(ConfigError, match=r"^reward.terms.a.api_key_env: .* variable ABSENT_KEY, which is not set;"):
        RewardScorer(config, decode)
