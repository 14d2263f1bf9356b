"""Episodes with an environment: tokens, rewards of turns, limits in their order, and refused environments."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from megarl.batch.trajectory import split_episodes
from megarl.config.rollout import EnvironmentConfig, RolloutConfig
from megarl.errors import AgentError, ConfigError
from megarl.rollout.environments.conversation import PLACEHOLDER
from megarl.rollout.environments.environment import Step, Task, check_environment
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import APPEND, STRIPS_THOUGHTS, chat_tokenizer
from tests.rollout.environments.scripted import Echo, TextEngine, make_job, make_worker, open_environments
from tests.rollout.whole_batches import make_generation
from tests.virtual_time import run_in_virtual_time


def replies(*texts: str) -> Callable[[str, str], str]:
    """Return a script: the texts turn by turn; the last one repeats."""

    def reply(prompt: str, request_id: str) -> str:
        turn = int(request_id.rpartition("-")[2].partition(".")[2] or 0)
        return texts[min(turn, len(texts) - 1)]

    return reply


def run(engine: TextEngine, environment: type = Echo, **config: Any) -> Any:
    job = make_job(engine.tokenizer, max_new_tokens=config.pop("max_new_tokens", 200))
    return run_in_virtual_time(make_worker(engine, environment, **config).rollout_group(job))


def test_an_episode_is_prompt_replies_and_masked_messages(tokenizer: Any) -> None:
    engine = TextEngine(tokenizer, replies("why", "yes it is", "done"))
    summary, (first, second) = run(engine)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    text = (
        "<|user|>\nis it?<eos>\n<|assistant|>\nwhy<eos>\n<|tool|>\n3<eos>\n<|assistant|>\nyes it is<eos>\n<|tool|>\n9"
        "<eos>\n<|assistant|>\ndone<eos>"
    )
    assert tokenizer.decode(first.token_ids) == text
    assert tokenizer.decode(first.token_ids[first.loss_mask]) == "why<eos>yes it is<eos>done<eos>"
    assert first.turn_rewards == (0.25, 0.25, 1.0)
    assert (first.rewards, first.finish_reason) == ({"game": 1.5}, "stop")
    assert summary.trajectories[0].num_turns == 3
    # each prompt is the tokens of the one before, what was sampled, and the new messages
    asked = [r.token_ids for r in engine.requests if "-1-1-0" in r.request_id]
    assert all(list(ids) == first.token_ids[: len(ids)].tolist() for ids in asked)
    assert not open_environments


@pytest.mark.parametrize(
    ("config", "ended", "turns"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_calls": 2, "kwargs": {"calls": 1}}, "calls", 2),
        ({"max_seconds": 25}, "seconds", 3),
        ({"max_new_tokens": 30}, "length", 3),
        ({"max_turns": 2, "max_calls": 2, "kwargs": {"calls": 1}}, "turns", 2),
        ({"max_seconds": 20, "max_calls": 2, "kwargs": {"calls": 1}}, "seconds", 2),
    ],
)
def test_the_first_limit_in_their_order_names_the_ending(tokenizer, config, ended, turns) -> None:
    engine = TextEngine(tokenizer, replies("why"), seconds=10.0 if "max_seconds" in config else 0.0)
    summary, (first, _) = run(engine, **config)
    assert (first.finish_reason, summary.trajectories[0].num_turns) == (ended, turns)
    assert not first.reward_errors
    assert not open_environments


class AbortableEngine(TextEngine):
    """A request that is aborted completes at once, with what it has of its text."""

    async def generate(self, request: Any) -> Any:
        self.aborts[request.request_id] = asyncio.Event()
        generating = asyncio.ensure_future(super().generate(request))
        aborted = asyncio.ensure_future(self.aborts[request.request_id].wait())
        await asyncio.wait([generating, aborted], return_when=asyncio.FIRST_COMPLETED)
        if generating.done():
            aborted.cancel()
            return generating.result()
        generating.cancel()
        return make_generation(self.tokenizer.encode("ye", add_special_tokens=False), reason="abort")

    async def abort(self, request_id: str) -> None:
        self.aborts[request_id].set()


class SlowStep(Echo):
    async def step(self, reply: str) -> Step:
        await asyncio.sleep(30)
        return await super().step(reply)


@pytest.mark.parametrize("environment", [Echo, SlowStep])
def test_the_time_limit_of_the_run_ends_an_episode_as_truncated(tokenizer: Any, environment: type) -> None:
    """Of a request, or of a step, which ends by the environment's own limit."""
    engine = AbortableEngine(tokenizer, replies("why"), seconds=10.0)
    engine.aborts = {}
    summary, (first, _) = run(engine, environment, limit=25, max_seconds=1000)
    assert first.finish_reason == "seconds"
    assert summary.kept == (0, 1)
    sampled = tokenizer.decode(first.token_ids[first.loss_mask])
    assert sampled == ("why<eos>why<eos>why<eos>ye" if environment is Echo else "why<eos>")
    assert first.rewards["game"] == (0.75 if environment is Echo else 0.25)
    assert not open_environments


class SilentEngine(TextEngine):
    async def generate(self, request: Any) -> Any:
        return make_generation([], reason="stop")


def test_an_engine_that_samples_no_token_fails_the_episode(tokenizer: Any) -> None:
    summary, _ = run(SilentEngine(tokenizer, replies("")))
    errors = [each.reward_errors["engine"] for each in summary.trajectories]
    assert errors == ["the engine sampled no token on d.jsonl:1"] * 2
    assert not open_environments


class LongPrompt(Echo):
    async def reset(self, task: Task) -> Any:
        return [{"role": "user", "content": "is it? " * 100}]


def test_an_oversized_first_prompt_ends_the_episode_as_truncated(tokenizer: Any) -> None:
    summary, (first, _) = run(TextEngine(tokenizer, replies("why")), LongPrompt, max_new_tokens=50)
    assert (first.finish_reason, first.loss_mask.sum(), summary.trajectories[0].num_turns) == ("length", 0, 0)


class Sentence(Echo):
    async def step(self, reply: str) -> Step:
        return Step(messages=[{"role": "tool", "content": "why " * 50}], done=False)


def test_messages_are_cut_to_their_bytes(tokenizer: Any) -> None:
    engine = TextEngine(tokenizer, replies("why"))
    _, (first, _) = run(engine, Sentence, max_turns=2, max_message_bytes=7)
    assert "<|tool|>\nwhy why<eos>\n" in tokenizer.decode(first.token_ids)


def test_stripped_thoughts_fork_segments_that_share_the_reward() -> None:
    tokenizer = chat_tokenizer(STRIPS_THOUGHTS)
    engine = TextEngine(tokenizer, replies("<think>so</think>why", "yes", "<think>is it</think>is", "done"))
    summary, trajectories = run(engine, forks="allow")
    (segments, _) = split_episodes(trajectories)
    texts = [tokenizer.decode(each.token_ids[each.loss_mask]) for each in segments]
    assert texts == ["<think>so</think>why<eos>", "yes<eos><think>is it</think>is<eos>", "done<eos>"]
    assert [each.turn_rewards for each in segments] == [(0.25,), (0.25, 0.25), (1.0,)]
    assert [each.rewards for each in segments] == [{"game": 1.75}] * 3
    assert "<think>" not in tokenizer.decode(segments[2].token_ids)
    assert summary.trajectories[0].num_segments == 3


REFUSALS = {
    "raises on a reply": APPEND.replace("{{ m.content }}", "{{ 1 // 0 if 'zap' in m.content else m.content }}"),
    "rewrites a reply": APPEND.replace("{{ m.content }}", "{{ m.content | replace('zap', 'zip') }}"),
}
"""Templates that fail on, or change, replies with the word zap, which no probe has."""


@pytest.mark.parametrize("name", REFUSALS)
def test_a_text_that_the_template_does_not_take_ends_the_episode_with_its_rewards(name: str) -> None:
    tokenizer = chat_tokenizer(REFUSALS[name])
    summary, (first, _) = run(TextEngine(tokenizer, replies("why", "a zap", "done")))
    assert (first.finish_reason, first.turn_rewards, first.rewards) == ("refused", (0.25, 0.25), {"game": 0.5})
    assert summary.kept == (0, 1)
    assert tokenizer.decode(first.token_ids[first.loss_mask]) == "why<eos>a zap<eos>"


class Blocking:
    """Methods that are not async; they run in threads of their own."""

    threads: ClassVar[set[int]] = set()

    def reset(self, task: Task) -> None:
        self.threads.add(threading.get_ident())

    def step(self, reply: str) -> Step:
        return Step(reward=0.5, done=True)

    def close(self) -> None:
        self.threads.add(threading.get_ident())


def test_blocking_methods_run_outside_the_event_loop(tokenizer: Any) -> None:
    worker = make_worker(TextEngine(tokenizer, replies("why")), Blocking)
    summary, _ = asyncio.run(worker.rollout_group(make_job(tokenizer)))
    assert [each.rewards for each in summary.trajectories] == [{"game": 0.5}] * 2
    assert threading.get_ident() not in Blocking.threads


class Returns(Echo):
    """Answers with what a test has set."""

    step_of: ClassVar[Callable[[str], Step]]

    async def step(self, reply: str) -> Step:
        return type(self).step_of(reply)


def exits(reply: str) -> Step:
    raise SystemExit(f"usage: {reply}")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise self


def raises_without_text(reply: str) -> Step:
    raise TextlessError


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (exits, "raised RuntimeError: SystemExit: usage: why"),
        (raises_without_text, "raised TextlessError: <TextlessError without text: TextlessError>"),
        (lambda _: Step(reward=10**400, done=True), "needs to return a finite reward up to 1e18, got 1000"),
        (lambda _: Step(reward=-2e18, done=True), "finite reward up to 1e18, got -2e"),
        (lambda _: Step(reward=10**5000, done=True), "finite reward up to 1e18, got <int without text: ValueError>"),
        (lambda _: next(iter(())), "raised RuntimeError: coroutine raised StopIteration"),
    ],
)
def test_what_an_environment_raises_fails_its_episode_only(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, step: Callable[[str], Step], message: str
) -> None:
    monkeypatch.setattr(Returns, "step_of", staticmethod(step), raising=False)
    summary, _ = run(TextEngine(tokenizer, replies("why")), Returns)
    for each in summary.trajectories:
        assert message in each.reward_errors["environment"]


@pytest.mark.parametrize("text", ["a\ud800b", f"{PLACEHOLDER} x", "\ue100\ue101"])
def test_any_text_of_an_environment_continues_the_episode(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    answer = Step(messages=[{"role": "tool", "content": text}], reward=0.5)
    monkeypatch.setattr(Returns, "step_of", staticmethod(lambda _: answer), raising=False)
    _, (first, _) = run(TextEngine(tokenizer, replies("why")), Returns, max_turns=2)
    assert (first.rewards, first.finish_reason, first.segment) == ({"game": 1.0}, "turns", 0)


class Singleton(Echo):
    one: Any = None

    def __new__(cls, **_: Any) -> Any:
        cls.one = cls.one or super().__new__(cls)
        return cls.one


class NoStep(Echo):
    async def step(self, reply: str) -> Any:
        return "7"


class Silent(Echo):
    async def step(self, reply: str) -> Step:
        return Step()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Singleton, r"needs a new object for each episode, .*:Singleton returned that of another episode"),
        (NoStep, r"rollout.env.path \(.*:NoStep\).step needs to return a Step, got str"),
        (Silent, r"rollout.env.path \(.*:Silent\).step needs to return messages, or done: got a Step with neither"),
    ],
)
def test_environments_that_break_the_interface_end_the_run(tokenizer: Any, environment: type, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        run(TextEngine(tokenizer, replies("why")), environment)


AN_OBJECT = object()


class NoClose:
    def reset(self, task: Task) -> None: ...
    def step(self, reply: str) -> None: ...


class NoReply(NoClose):
    def step(self) -> None: ...  # type: ignore[override]
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"path": "AN_OBJECT"}, "needs a class, got .*:AN_OBJECT, a object"),
        ({"path": "NoClose"}, r"needs a class with the methods reset, step, close, .*:NoClose has no close"),
        ({"path": "NoReply"}, r"NoReply.step\(self\) -> None needs to take 1 arguments: too many positional"),
        ({"path": "Echo", "kwargs": {"what": 1}}, r"^rollout.env.kwargs: .*:Echo.* does not take these arguments: "),
        ({"path": "Missing"}, r"^rollout.env.path: module .* has no 'Missing'$"),
    ],
)
def test_environments_are_checked_before_the_run(config: dict[str, Any], message: str) -> None:
    section = EnvironmentConfig(**{**config, "path": f"{__name__}:{config['path']}"})
    with pytest.raises(ConfigError, match=message):
        check_environment(section)


def test_agent_and_environment_exclude_each_other() -> None:
    with expect_error(ValidationError, "agent and env", "agent.path = a:b"):
        RolloutConfig.model_validate({"agent": {"path": "a:b"}, "env": {"path": "c:D"}})
    config = RolloutConfig.model_validate({"env": {"path": "c:D"}})
    assert RolloutConfig.model_validate(config.model_dump()) == config


class Prefilled(Echo):
    """Begins with a message of the assistant."""

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        return [*task.messages, {"role": "assistant", "content": "yes"}]


class InParts(Echo):
    """Its messages have parts of text, and none where the assistant has only called a tool."""

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": "is "}, {"type": "text", "text": "it?"}]
        return [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, *task.messages]


def test_messages_of_an_environment_that_end_with_the_assistant_are_refused(tokenizer: Any) -> None:
    with pytest.raises(AgentError, match=r"reset needs messages of which the policy answers the last"):
        run(TextEngine(tokenizer, replies("done")), Prefilled)
    open_environments.clear()


def test_parts_of_text_are_joined_and_null_is_empty(tokenizer: Any) -> None:
    _, (first, _) = run(TextEngine(tokenizer, replies("done")), InParts)
    head = "<|user|>\nis it?<eos>\n<|assistant|>\n<eos>\n<|user|>\nis it?<eos>\n"
    assert tokenizer.decode(first.token_ids) == head + "<|assistant|>\ndone<eos>"
