"""Texts that arise in a run and have a token that the model lacks: they end their episode, never the run."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.agents.episode import Episode, RefusedTextError
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.environments.environment import Step, Task
from megarl.rollout.rollout_worker import RolloutWorker, RolloutWorkerSpec
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import APPEND, DAY, chat_tokenizer
from tests.rollout.environments.scripted import Echo, TextEngine, TurnScorer, make_job, make_worker
from tests.rollout.gateway import test_sessions as sessions
from tests.virtual_time import run_in_virtual_time

NEW = "<|new|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokenizer with the token `NEW`, for which its model has no row."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), chat_tokenizer(APPEND)
    config = {"model_type": "llama", "vocab_size": len(tokenizer)}
    tokenizer.add_tokens([AddedToken(NEW)])
    tokenizer.save_pretrained(folder)
    Path(folder, "config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


class SaysNew(Echo):
    async def step(self, reply: str) -> Step:
        message = {"role": "tool", "content": f"no {NEW}" if reply == "new" else "7"}
        return Step(messages=[message], reward=0.25, done=reply == "done")


class BeginsWithNew(Echo):
    async def reset(self, task: Task) -> Any:
        return [{"role": "user", "content": NEW}]


@pytest.mark.parametrize(
    ("environment", "texts", "rewards"),
    [
        (SaysNew, ["why", "new", "done"], (0.25, 0.25)),
        (BeginsWithNew, ["why"], ()),
    ],
)
def test_a_message_of_an_environment_ends_its_episode(
    tokenizer: Any, environment: type, texts: list[str], rewards: tuple[float, ...]
) -> None:
    def reply(prompt: str, request_id: str) -> str:
        return texts[int(request_id.rpartition("-")[2].partition(".")[2] or 0)]

    worker = make_worker(TextEngine(tokenizer, reply), environment)
    summary, trajectories = run_in_virtual_time(worker.rollout_group(make_job(tokenizer)))
    assert [(t.finish_reason, t.turn_rewards) for t in trajectories] == [("refused", rewards)] * 2
    assert summary.kept == (0, 1)
    assert max(max(t.token_ids) for t in trajectories) < len(tokenizer) - 1


def observing(observation: Any) -> Any:
    """Return an agent that shows this to the policy of the second sample."""

    async def agent(episode: Episode) -> Any:
        await episode.generate()
        if "-1-1-1" in episode._request_id:
            episode.observe(observation)
            await episode.generate()
        return episode.trajectory()

    return agent


async def forks(episode: Episode) -> Any:
    episode.fork([5, 10**6])


async def completes(episode: Episode) -> Any:
    await episode.complete([5, 10**6], max_new_tokens=3)


async def invents(episode: Episode) -> Any:
    trajectory = await single_turn(episode)
    trajectory.token_ids[-1] = 10**6
    return trajectory


@pytest.mark.parametrize("agent", [observing(f"7 {NEW}"), observing([5, 10**6]), observing([-1])])
def test_an_observation_of_an_agent_leaves_its_episode_out(tokenizer: Any, agent: Any) -> None:
    engine = TextEngine(tokenizer, lambda prompt, request_id: "yes")
    worker = RolloutWorker(
        RolloutWorkerSpec(request_timeout_seconds=1e6, agent=agent), [engine], TurnScorer(), tokenizer=tokenizer
    )
    summary, trajectories = run_in_virtual_time(worker.rollout_group(make_job(tokenizer)))
    assert summary.kept == (0,)
    (error,) = trajectories[1].reward_errors.values()
    assert "is not in the model's vocabulary" in error


@pytest.mark.parametrize("agent", [forks, completes, invents])
def test_no_token_beyond_the_vocabulary_reaches_engine_or_trainer(tokenizer: Any, agent: Any) -> None:
    engine = TextEngine(tokenizer, lambda prompt, request_id: "yes")
    worker = RolloutWorker(
        RolloutWorkerSpec(request_timeout_seconds=1e6, agent=agent), [engine], TurnScorer(), tokenizer=tokenizer
    )
    summary, trajectories = run_in_virtual_time(worker.rollout_group(make_job(tokenizer)))
    assert summary.kept == ()
    sent = [*(r.token_ids for r in engine.requests), *(t.token_ids for t in trajectories)]
    assert max(map(max, sent)) < len(tokenizer)


def test_a_request_to_the_gateway_is_refused(tokenizer: Any) -> None:
    _, summary, _ = sessions.send(tokenizer, sessions.chat(f"is it {NEW}?"), sessions.chat("is it?"))
    first, second = sessions.answers
    assert (first.status_code, second.status_code) == (400, 200)
    assert f"token {len(tokenizer) - 1} ('{NEW}') is not in the model's" in first.json()["error"]["message"]
    assert summary.trajectories[0].num_turns == 1


def test_a_template_that_fails_on_a_text_refuses_that_text() -> None:
    renderer = ChatRenderer(
        chat_tokenizer(APPEND.replace("{{ m.content }}", "{{ 1 // 0 if 'zap' in m.content else m.content }}")), DAY
    )
    with expect_error(RefusedTextError, "ZeroDivisionError"):
        renderer.prompt([{"role": "user", "content": "zap"}])
