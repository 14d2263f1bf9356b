"""Loading an agent by its import path, and running it: what its author is told about mistakes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.rollout import AgentConfig
from megarl.errors import AgentError, ConfigError, WorkerError
from megarl.rollout.agents.agent import check_agent, load_agent
from megarl.rollout.agents.run_agent import run_agent
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.engine import Generation, GenerationRequest
from tests.rollout.agents.test_episode import CountingEngine, start

MODULE = """
created = []
async def plain(episode): return "plain"
async def with_kwargs(episode, *, turns, hint=""): return (episode, turns, hint)
async def nothing(): pass
async def two(episode, other): pass
def sync(episode): return "sync"
number = 3
class WithSetUp:
    def __init__(self, *, turns=1):
        created.append(turns)
        self.turns = turns
    async def run(self, episode): return (episode, self.turns)
class SyncRun:
    def run(self, episode): pass
class NoEpisode:
    async def run(self): pass
class Broken(WithSetUp):
    def __init__(self): raise OSError("no such index")
"""


@pytest.fixture(autouse=True)
def my_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the working directory."""
    (tmp_path / "my_agents.py").write_text(MODULE)
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield
    sys.path[:] = path
    sys.modules.pop("my_agents", None)


def run(config: AgentConfig, episode: Any = "episode") -> Any:
    return asyncio.run(load_agent(config)(episode))  # type: ignore[arg-type]


def test_functions_and_classes_get_their_keyword_arguments() -> None:
    assert run(AgentConfig(path="my_agents:plain")) == "plain"
    assert run(AgentConfig(path="my_agents:with_kwargs", kwargs={"turns": 2})) == ("episode", 2, "")
    assert run(AgentConfig(path="my_agents:WithSetUp", kwargs={"turns": 4})) == ("episode", 4)


def test_a_class_is_created_once_by_loading_and_never_by_checking() -> None:
    config = AgentConfig(path="my_agents:WithSetUp")
    check_agent(config)
    created = sys.modules["my_agents"].created
    assert created == []
    agent = load_agent(config)
    assert [asyncio.run(agent(n))[0] for n in range(3)] == [0, 1, 2]  # type: ignore[arg-type, index]
    assert created == [1]


def test_the_default_is_one_completion() -> None:
    assert check_agent(AgentConfig()) is single_turn
    engine = CountingEngine([2])
    trajectory = asyncio.run(load_agent(AgentConfig())(start(engine)))
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert [r.request_id for r in engine.requests] == ["step-5-2-1"]


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("my_agents", {}, "rollout.agent.path needs package.module:agent, got 'my_agents'"),
        ("nowhere:run", {}, "rollout.agent.path: cannot import nowhere: No module named 'nowhere'"),
        ("my_agents:missing", {}, r"rollout.agent.path: module my_agents \(.*\) has no 'missing'"),
        ("my_agents:number", {}, "rollout.agent.path needs an async function or a class, got my_agents:number = 3"),
        ("my_agents:sync", {}, "rollout.agent.path needs an async function or a class, got my_agents:sync = "),
        ("my_agents:nothing", {}, r"rollout.agent.path: my_agents:nothing\(\) needs to take an episode: too many"),
        (
            "my_agents:two",
            {},
            r"rollout.agent.kwargs: my_agents:two\(episode, other\) does not take these arguments: missing a required "
            r"argument: 'other'",
        ),
        (
            "my_agents:with_kwargs",
            {},
            r"rollout.agent.kwargs: my_agents:with_kwargs\(.*\) does not take .*: missing a required .*'turns'",
        ),
        (
            "my_agents:with_kwargs",
            {"turns": 1, "turn": 2},
            r"rollout.agent.kwargs: .* got an unexpected keyword argument 'turn'",
        ),
        ("my_agents:plain", {"episode": 1}, r"rollout.agent.kwargs: .* multiple values for argument 'episode'"),
        ("my_agents:SyncRun", {}, r"rollout.agent.path needs a class with the method `async def run\(self, episode\)`"),
        ("my_agents:NoEpisode", {}, r"rollout.agent.path: my_agents:NoEpisode.run\(self\) needs to take an episode"),
        ("my_agents:WithSetUp", {"turn": 1}, r"rollout.agent.kwargs: my_agents:WithSetUp\(.*\) does not take .*'turn'"),
    ],
)
def test_mistakes_are_found_without_running_the_agent(path: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_agent(AgentConfig(path=path, kwargs=kwargs))


def test_a_failing_constructor_is_reported() -> None:
    check_agent(AgentConfig(path="my_agents:Broken"))
    with pytest.raises(ConfigError, match=r"^rollout.agent.path: creating my_agents:Broken raised OSError: no such"):
        load_agent(AgentConfig(path="my_agents:Broken"))


async def returns_text(episode: Any) -> Any:
    return "text"


async def changes_prompt(episode: Any) -> Any:
    return replace(await single_turn(episode), prompt_id="d.jsonl:2")


async def samples_first_token(episode: Any) -> Any:
    trajectory = await single_turn(episode)
    return replace(trajectory, loss_mask=np.ones(trajectory.num_tokens, np.bool_))


async def too_long(episode: Any) -> Any:
    trajectory = await single_turn(episode)
    per_token = ("token_ids", "loss_mask", "logprobs", "policy_versions")
    return replace(trajectory, **{name: np.repeat(getattr(trajectory, name), 9) for name in per_token})


async def logprobs_of_the_prompt(episode: Any) -> Any:
    trajectory = await single_turn(episode)
    return replace(trajectory, logprobs=np.full(trajectory.num_tokens, -0.5, np.float32))


async def raises(episode: Any) -> Any:
    await episode.generate()
    raise TimeoutError("the tool hangs")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (returns_text, "needs to return a trajectory, got str on d.jsonl:1"),
        (changes_prompt, r"returned a trajectory that belongs to another prompt: .*'d.jsonl:1', 2\), got .*:2', 2\)"),
        (samples_first_token, "returned a trajectory that has no token before its first sampled one, on d.jsonl:1"),
        (too_long, r"returned a .* too long: .* 3 \+ 20 = 23 tokens, got 45, on d.jsonl:1"),
        (logprobs_of_the_prompt, "has log-probabilities for tokens that were not sampled, on d.jsonl:1"),
        (raises, r"raised TimeoutError: the tool hangs \(at .*test_agent.py:\d+\) on d.jsonl:1"),
    ],
)
def test_failures_of_an_agent_name_it_and_the_prompt(agent: Any, message: str) -> None:
    with pytest.raises(AgentError, match=rf"^rollout.agent.path \(my_agents:x\) .*{message}"):
        asyncio.run(run_agent(agent, start(CountingEngine([2])), path="my_agents:x"))


class RejectingEngine(CountingEngine):
    async def generate(self, request: GenerationRequest) -> Generation:
        raise WorkerError("too long")


def test_errors_of_the_engine_pass_through() -> None:
    with pytest.raises(WorkerError, match=r"^too long$"):
        asyncio.run(run_agent(single_turn, start(RejectingEngine([])), path="x"))
