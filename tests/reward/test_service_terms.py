"""The terms `http` and `judge` with a service that fails, hangs, is slow, down, or answers nonsense; circuit breakers.

The service has scripted faults, and runs in virtual time or on the loopback interface; the judge answers as an
OpenAI-compatible chat endpoint does.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

import httpx
import pytest
from aiohttp import web
from httpx import Response
from openai.types.chat import ChatCompletion

from megarl.batch.trajectory import Prompt, ScoredGroup, Trajectory
from megarl.config.reward import RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.reward_scorer import RewardScorer
from megarl.reward.services import CircuitBreaker, CircuitOpenError
from megarl.run.reward_weights import RewardFailures
from tests.errors import expect_error
from tests.reward.conftest import make_scorer, make_trajectory
from tests.run.finished_groups import finished_group
from tests.time_limits import UNREACHED_SECONDS
from tests.virtual_time import run_in_virtual_time

T = TypeVar("T")
URL = "http://service"


@dataclass
class Faults:
    """Shares of the requests that go wrong, decided by a seeded generator."""

    error: float = 0.0
    """Answered with a status 500, 502, 503 or 429."""
    hang: float = 0.0
    """Requests that get no answer at all."""
    slow: float = 0.0
    """Answered after 0.1 s."""
    random: Random = field(default_factory=lambda: Random(0))

    def next(self) -> str:
        draw = self.random.random()
        for name, share in (("error", self.error), ("hang", self.hang), ("slow", self.slow)):
            if draw < share:
                return name
            draw -= share
        return "good"


@dataclass
class LocalService:
    """Answers POST requests with what `answer` returns for their JSON body."""

    answer: Callable[[Any], Any]
    """Returns the answer, or a `Response`."""
    faults: Faults = field(default_factory=Faults)
    requests: list[Any] = field(default_factory=list)
    """Bodies of all requests."""
    headers: list[httpx.Headers] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """How requests were handled."""
    num_concurrent: int = 0
    max_concurrent: int = 0

    async def handle(self, request: httpx.Request) -> Response:
        body = json.loads(request.content)
        self.requests.append(body)
        self.headers.append(request.headers)
        kind = self.faults.next()
        self.kinds[kind] += 1
        self.num_concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self.num_concurrent)
        try:
            match kind:
                case "error":
                    return Response(self.faults.random.choice([500, 502, 503, 429]), text="overloaded")
                case "hang":
                    await asyncio.get_running_loop().create_future()
                case "slow":
                    await asyncio.sleep(0.1)
            found = self.answer(body)
            return found if isinstance(found, Response) else Response(200, json=found)
        finally:
            self.num_concurrent -= 1

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work` in virtual time; httpx clients that it makes get their answers from here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(self.handle)))
            return run_in_virtual_time(work())

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Yield the address of the service on the loopback interface."""

        async def respond(request: web.Request) -> web.Response:
            asked = httpx.Request("POST", str(request.url), headers=request.headers, content=await request.read())
            response = await self.handle(asked)
            return web.Response(status=response.status_code, body=response.content)

        app = web.Application()
        app.router.add_post("/{path:.*}", respond)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


FAST = {"timeout_seconds": 0.25}
PATIENT = {"timeout_seconds": UNREACHED_SECONDS}


def lengths(body: Any) -> list[float]:
    return [float(len(item["completion"])) for item in body["completions"]]


def prompt(number: int) -> Prompt:
    return Prompt(prompt_id=f"a.jsonl:{number}", text=f"Q{number}", token_ids=(1,), row={"n": number}, answer="7")


async def run_with(work: Callable[[RewardScorer], Awaitable[Any]], url: str, **fields: Any) -> Any:
    """Create a scorer with the term `judge`, of type http by default, and return the result of `work`."""
    scorer = make_scorer(judge={"type": "http", "url": url, **FAST, **fields})
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
    limits = {"max_batch_size": 4, "max_concurrent_requests": 8, "max_retries": 6}
    scored = run(service, partial(score_groups, num_groups=60, size=8), **limits)
    rewards = [trajectory.rewards["judge"] for group in scored for trajectory in group]
    assert rewards == [float(n) for n in range(1, 481)], "every score is that of its completion, and none is 0"
    assert not any(trajectory.reward_errors for group in scored for trajectory in group)
    assert service.kinds >= Counter(error=20, hang=3, slow=8)
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
    assert service.requests == [{"completions": [sent | {"other_answers": [], "row": {"n": 1, "day": "2026-01-02"}}]}]
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
    assert [t.rewards.get("judge") for t in scored] == [1.0, 2.0, None, 3.0, 1.0]
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
    with expect_error(RewardError, "5", "reward.terms.judge", "64"):
        failures.check(5)


def test_a_service_that_comes_back_while_requests_are_held_back_scores_them() -> None:
    def answer(body: Any) -> Any:
        return Response(503) if len(service.requests) <= 8 else lengths(body)

    service = LocalService(answer)
    scored = score(service, ["a", "bb", "ccc"], max_batch_size=1, max_retries=6)
    assert [t.rewards["judge"] for t in scored] == [1.0, 2.0, 3.0]


def test_a_canceled_group_does_not_cancel_the_requests_of_others() -> None:
    service = LocalService(lengths, Faults(slow=1.0))

    async def work(scorer: RewardScorer) -> list[Trajectory]:
        first = asyncio.create_task(scorer.score([make_trajectory("a")], prompt(1)))
        second = asyncio.create_task(scorer.score([make_trajectory("bb")], prompt(2)))
        await asyncio.sleep(0.06)
        first.cancel()
        return (await second).trajectories

    (scored,) = run(service, work)
    assert scored.rewards == {"judge": 2.0}
    assert len(service.requests) == 1


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    async def work(scorer: RewardScorer) -> ScoredGroup:
        return await scorer.score([make_trajectory("a")], prompt(1))

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        (scored,) = asyncio.run(run_with(work, url, max_retries=0, **PATIENT)).trajectories
    assert "the service cannot be reached: ConnectError" in scored.reward_errors["judge"]


def test_invalid_configurations_name_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT_KEY", raising=False)
    with expect_error(ValueError, "http://", "https://", "'judge:80'"):
        make_scorer(a={"type": "http", "url": "judge:80"})
    with expect_error(ConfigError, "reward.terms.a.api_key_env", "ABSENT_KEY"):
        make_scorer(a={"type": "http", "url": "http://x", "api_key_env": "ABSENT_KEY"})


RUBRIC = "Question: {prompt}\nReference: {answer}\nAnswer: {completion}\nEnd with 'Score: N', N from 1 to 5."
FIELDS = {"type": "judge", "model": "judge-7b", "rubric": RUBRIC, "min_score": 1, "max_score": 5}
PROMPT = Prompt(prompt_id="a.jsonl:1", text="What is 3 + 4?", token_ids=(1,), row={}, answer="7")


def reply(text: str | None) -> dict[str, Any]:
    """Return a chat completion, checked by OpenAI's own types."""
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "finish_reason": "stop", "logprobs": None, "message": message}]
    tree = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "judge-7b", "choices": choices}
    return ChatCompletion.model_validate(tree).model_dump()


def grade(body: dict[str, Any]) -> dict[str, Any]:
    """Give the number in the judged answer as its score."""
    answer = re.search(r"Answer: .*?(\d)", body["messages"][-1]["content"])
    assert answer is not None
    return reply(f"A first score: 1. On reflection, the answer is fine.\n**Score**: {answer[1]}")


def score_by_judge(
    service: LocalService, texts: Sequence[str], about: Prompt = PROMPT, **fields: Any
) -> list[Trajectory]:
    async def work(scorer: RewardScorer) -> ScoredGroup:
        return await scorer.score([make_trajectory(text) for text in texts], about)

    return service.run(partial(run_with, work, f"{URL}/v1/", **{**FIELDS, **fields})).trajectories


def test_scores_are_scaled_to_0_to_1() -> None:
    scored = score_by_judge(LocalService(grade), ["it is 1", "it is 2", "it is 5"])
    assert [t.rewards for t in scored] == [
        {"judge": 0.0, "judge/score": 1.0},
        {"judge": 0.25, "judge/score": 2.0},
        {"judge": 1.0, "judge/score": 5.0},
    ]


def test_the_request_is_that_of_a_chat_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    service = LocalService(grade)
    text = "I say {answer} and {prompt} 3"
    score_by_judge(service, [text], api_key_env="JUDGE_KEY", system="Be strict.", extra_body={"seed": 1}, max_tokens=9)
    rubric = RUBRIC.replace("{prompt}", PROMPT.text).replace("{answer}", "7").replace("{completion}", text)
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": rubric}]
    options = {"temperature": 0.0, "max_tokens": 9, "seed": 1}
    assert service.requests == [{"model": "judge-7b", "messages": messages, **options}]
    assert service.headers[0]["Authorization"] == "Bearer secret"


def test_faults_of_the_endpoint_change_no_score() -> None:
    service = LocalService(grade, Faults(error=0.2, hang=0.05, slow=0.1))
    scored = score_by_judge(service, [f"it is {1 + i % 5}" for i in range(80)], max_retries=8)
    assert [t.rewards["judge/score"] for t in scored] == [1.0 + i % 5 for i in range(80)]
    assert service.kinds >= Counter(error=10, hang=2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: reply("I like it."), "the judge's reply has no match of the pattern "),
        (lambda _: reply("Score: 6"), "the judge's score needs to be between 1 and 5, got 6"),
        (lambda _: reply(None), "the judge's reply needs to be text, got None"),
        (lambda _: {"choices": []}, "the answer needs choices[0].message.content, got {'choices': []}"),
        (lambda _: Response(404, text="no model"), "refused the request with status 404: 'no model'"),
    ],
)
def test_a_reply_without_a_score_is_a_failure(answer: Callable[[Any], Any], message: str) -> None:
    service = LocalService(answer)
    (scored,) = score_by_judge(service, ["it is 3"])
    assert scored.reward_errors["judge"].startswith(f"reward.terms.judge (judge, {URL}/v1/): ")
    assert message in scored.reward_errors["judge"]
    assert (scored.rewards, len(service.requests)) == ({}, 2)


def test_a_rubric_with_an_answer_needs_one() -> None:
    without = Prompt(prompt_id="a.jsonl:2", text="Q", token_ids=(1,), row={})
    with expect_error(RewardError, "a.jsonl:2"):
        score_by_judge(LocalService(grade), ["it is 3"], without)
    (scored,) = score_by_judge(LocalService(grade), ["it is 3"], without, rubric="Answer: {completion}")
    assert scored.rewards["judge"] == 0.5


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"rubric": "Judge!"},
            ValueError,
            "rubric needs to contain {completion}, which the text of the completion repl",
        ),
        ({"min_score": 5}, ValueError, "min_score needs to be below max_score, got 5 >= 5"),
        ({"pattern": r"\d"}, ConfigError, "reward.terms.judge.pattern: needs a group around the score, "),
    ],
)
def test_invalid_configurations_of_a_judge_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make_scorer(judge={**FIELDS, "url": "http://x/v1", **fields})


COOLDOWN = 0.5


class Guarded:
    """Counts requests; they fail while it is down."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker, self.is_up, self.num_sent = breaker, False, 0

    async def request(self) -> str:
        try:
            async with self.breaker.request():
                self.num_sent += 1
                await asyncio.sleep(0.001)
                if not self.is_up:
                    raise ConnectionError
        except CircuitOpenError:
            return "held back"
        except ConnectionError:
            return "failed"
        return "answered"


def in_virtual_time(work: Callable[[Guarded], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Return a test that runs `work` with a service behind a breaker with 8 slots."""

    def test() -> None:
        run_in_virtual_time(work(Guarded(CircuitBreaker(8, max_failures=3, cooldown_seconds=COOLDOWN))))

    test.__doc__ = work.__doc__
    return test


async def fail_three_times(service: Guarded) -> None:
    for _ in range(3):
        assert not service.breaker.is_open
        assert await service.request() == "failed"
    assert service.breaker.is_open


@in_virtual_time
async def test_successes_between_failures_keep_it_closed(service: Guarded) -> None:
    for _ in range(5):
        service.is_up = False
        assert [await service.request() for _ in range(2)] == ["failed"] * 2
        service.is_up = True
        assert await service.request() == "answered"
    assert not service.breaker.is_open


@in_virtual_time
async def test_while_the_service_is_down_one_request_per_cooldown_is_sent(service: Guarded) -> None:
    await fail_three_times(service)
    for cooldown in (1, 2, 3):
        results = await asyncio.gather(*(service.request() for _ in range(20)))
        assert sorted(results) == ["failed"] + ["held back"] * 19
        assert service.num_sent == 3 + cooldown


@in_virtual_time
async def test_requests_that_were_held_back_are_sent_once_the_service_is_up(service: Guarded) -> None:
    await fail_three_times(service)
    start = asyncio.get_running_loop().time()
    waiting = [asyncio.create_task(service.request()) for _ in range(20)]
    await asyncio.sleep(COOLDOWN / 2)
    assert service.num_sent == 3
    service.is_up = True
    assert await asyncio.gather(*waiting) == ["answered"] * 20
    assert COOLDOWN <= asyncio.get_running_loop().time() - start < 1.1 * COOLDOWN
    assert not service.breaker.is_open


@in_virtual_time
async def test_a_canceled_trial_leaves_the_next_one_to_another_request(service: Guarded) -> None:
    await fail_three_times(service)
    service.is_up = True
    trial, other = (asyncio.create_task(service.request()) for _ in range(2))
    while service.num_sent == 3:
        await asyncio.sleep(COOLDOWN / 1000)
    trial.cancel()
    assert await other == "answered"
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert not service.breaker.is_open


@in_virtual_time
async def test_requests_that_wait_for_a_slot_are_held_back_too(service: Guarded) -> None:
    """Of 100 requests at once, 8 are sent; the others wait for the result of one trial, and are not sent in turn."""
    results = await asyncio.gather(*(service.request() for _ in range(100)))
    assert service.num_sent == 8 + 1
    assert results.count("held back") == 91


@in_virtual_time
async def test_no_more_requests_are_in_flight_than_there_are_slots(service: Guarded) -> None:
    service.is_up = True
    waiting = [asyncio.create_task(service.request()) for _ in range(100)]
    while not all(task.done() for task in waiting):
        assert service.num_sent - sum(task.done() for task in waiting) <= 8
        await asyncio.sleep(0.0001)
    assert [task.result() for task in waiting] == ["answered"] * 100
