"""The term `judge` with a service that answers as an OpenAI-compatible chat endpoint does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from httpx import Response
from openai.types.chat import ChatCompletion

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.reward import RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.reward_scorer import RewardScorer
from tests.reward.conftest import decode, make_trajectory
from tests.reward.services.local_service import URL, Faults, LocalService

RUBRIC = "Question: {prompt}\nReference: {answer}\nAnswer: {completion}\nEnd with 'Score: N', N from 1 to 5."
FIELDS = {
    "type": "judge", "model": "judge-7b", "rubric": RUBRIC, "min_score": 1, "max_score": 5, "backoff_seconds": 0.01,
    "timeout_seconds": 0.25, "breaker": {"failures": 5, "cooldown_seconds": 0.05},
}  # fmt: skip
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


def score(service: LocalService, texts: Sequence[str], prompt: Prompt = PROMPT, **fields: Any) -> list[Trajectory]:
    async def work() -> list[Trajectory]:
        config = RewardsConfig.model_validate({"terms": {"style": {**FIELDS, "url": f"{URL}/v1/", **fields}}})
        scorer = RewardScorer(config, decode)
        try:
            return (await scorer.score([make_trajectory(text) for text in texts], prompt)).trajectories
        finally:
            await scorer.close()

    return service.run(work)


def test_scores_are_scaled_to_0_to_1() -> None:
    scored = score(LocalService(grade), ["it is 1", "it is 2", "it is 5"])
    assert [t.rewards for t in scored] == [
        {"style": 0.0, "style/score": 1.0},
        {"style": 0.25, "style/score": 2.0},
        {"style": 1.0, "style/score": 5.0},
    ]


def test_the_request_is_that_of_a_chat_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    service = LocalService(grade)
    text = "I say {answer} and {prompt} 3"
    score(service, [text], api_key_env="JUDGE_KEY", system="Be strict.", extra_body={"seed": 1}, max_tokens=9)
    rubric = RUBRIC.replace("{prompt}", PROMPT.text).replace("{answer}", "7").replace("{completion}", text)
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": rubric}]
    options = {"temperature": 0.0, "max_tokens": 9, "seed": 1}
    assert service.requests == [{"model": "judge-7b", "messages": messages, **options}]
    assert service.headers[0]["Authorization"] == "Bearer secret"


def test_faults_of_the_endpoint_change_no_score() -> None:
    service = LocalService(grade, Faults(error=0.2, hang=0.05, slow=0.1))
    scored = score(service, [f"it is {1 + i % 5}" for i in range(80)], max_retries=8)
    assert [t.rewards["style/score"] for t in scored] == [1.0 + i % 5 for i in range(80)]
    assert service.kinds["error"] >= 10
    assert service.kinds["hang"] >= 2


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
    (scored,) = score(service, ["it is 3"])
    assert scored.reward_errors["style"].startswith(f"reward.terms.style (judge, {URL}/v1/): ")
    assert message in scored.reward_errors["style"]
    assert (scored.rewards, len(service.requests)) == ({}, 2)


def test_a_rubric_with_an_answer_needs_one() -> None:
    without = Prompt(prompt_id="a.jsonl:2", text="Q", token_ids=(1,), row={})
    with pytest.raises(RewardError, match=r"needs a reference answer for its rubric .*, but a.jsonl:2 has none$"):
        score(LocalService(grade), ["it is 3"], without)
    (scored,) = score(LocalService(grade), ["it is 3"], without, rubric="Answer: {completion}")
    assert scored.reward == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rubric": "Judge!"}, "rubric needs to contain {completion}, which the text of the completion replaces"),
        ({"min_score": 5}, "min_score needs to be below max_score, got 5 >= 5"),
    ],
)
def test_invalid_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RewardsConfig.model_validate({"terms": {"style": {**FIELDS, "url": "http://x/v1", **fields}}})


def test_a_pattern_needs_a_group() -> None:
    config = RewardsConfig.model_validate({"terms": {"style": {**FIELDS, "url": "http://x/v1", "pattern": r"\d"}}})
    with pytest.raises(ConfigError, match=r"^reward.terms.style.pattern: needs a group around the score, .* got '"):
        RewardScorer(config, decode)
