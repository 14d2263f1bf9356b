"""An episode: its tokens, requests and limits; loading an agent, and what its author is told about mistakes."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch.pack import pack
from megarl.batch.trajectory import Prompt
from megarl.config.rollout import AgentConfig
from megarl.data.tiny_checkpoint import EOS, train_tokenizer
from megarl.engines.engine import Generation, GenerationRequest, Sampling
from megarl.errors import AgentError, ConfigError, WorkerError
from megarl.rollout.agents.agent import check_agent, load_agent, run_agent
from megarl.rollout.agents.episode import Episode
from megarl.rollout.agents.single_turn import single_turn
from tests.errors import expect_error
from tests.rollout.clock import in_event_loop
from tests.rollout.whole_batches import WholeBatches, make_generation, token_routes, with_routes

PROMPT = (40, 41, 42)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["the tool says 7 eos"], vocab_size=270, context_length=64)


@dataclass
class CountingEngine(WholeBatches):
    """Samples the token ids 100, 101, ... with log-probabilities -1, -2, ...; `lengths`: of one completion each."""

    lengths: list[int]
    requests: list[GenerationRequest] = field(default_factory=list)
    num_sampled: int = 0
    returns_routes: bool = False

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        length, most = self.lengths.pop(0), request.sampling.max_new_tokens
        count = np.arange(self.num_sampled, self.num_sampled + min(length, most))
        self.num_sampled += len(count)
        generation = make_generation(100 + count, -1.0 - count, 3, "stop" if length <= most else "length")
        return with_routes(generation, request) if self.returns_routes else generation


def start(engine: Any, tokenizer: Any = None, *, max_new_tokens: int = 20, seed: int | None = None) -> Episode:
    prompt = Prompt(prompt_id="d.jsonl:1", text="", token_ids=PROMPT, row={"level": 2}, answer="7")
    sampling = Sampling(temperature=1.0, max_new_tokens=max_new_tokens, seed=seed)
    return Episode(prompt, tokenizer, engine, sampling, request_id="step-5-2-1", group_id=2)


@in_event_loop
async def test_sampled_tokens_are_trained_on_once_and_observed_ones_never() -> None:
    engine = CountingEngine([2, 3])
    episode = start(engine)
    await episode.generate()
    episode.observe([50, 51, 52, 53])
    await episode.generate()
    episode.observe([54])
    assert engine.requests[1].token_ids == (*PROMPT, 100, 101, 50, 51, 52, 53)
    trajectory = episode.trajectory()
    assert episode.token_ids == (*PROMPT, 100, 101, 50, 51, 52, 53, 102, 103, 104, 54)
    assert trajectory.token_ids.tolist() == list(episode.token_ids)
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 4 + [True] * 3 + [False]
    assert trajectory.logprobs.tolist() == [0.0] * 3 + [-1.0, -2.0] + [0.0] * 4 + [-3.0, -4.0, -5.0] + [0.0]
    assert trajectory.policy_versions.tolist() == [-1] * 3 + [3] * 2 + [-1] * 4 + [3] * 3 + [-1]
    assert (trajectory.prompt_length, trajectory.finish_reason) == (3, "stop")

    packed = pack([trajectory, trajectory], multiple=4, sequence_multiple=2)
    assert packed.target_ids_T[packed.mask_T].tolist() == [100, 101, 102, 103, 104] * 2
    assert packed.rollout_logprobs_T[packed.mask_T].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0] * 2
    assert packed.rollout_logprobs_T[~packed.mask_T].abs().sum() == 0
    assert set(packed.sequence_tokens_T[packed.mask_T].tolist()) == {5.0}
    # the input of a trained position is the token before its target: also the last observed one
    assert packed.token_ids_T[packed.mask_T].tolist() == [42, 100, 53, 102, 103] * 2
    assert torch.equal(packed.target_ids_T[packed.mask_T][:5], packed.token_ids_T[packed.mask_T.roll(1)][:5])


@in_event_loop
async def test_an_episode_asks_for_the_routes_of_each_token_once() -> None:
    engine = CountingEngine([2, 3, 1], returns_routes=True)
    episode = start(engine)
    await episode.generate()
    episode.observe([50, 51])
    await episode.generate()
    episode.observe([54])
    trajectory = episode.trajectory()
    assert [request.num_routed for request in engine.requests] == [0, 4]
    want = token_routes(trajectory.token_ids)
    want[-2:] = 0  # the engine has not computed with the last token that it has sampled, nor with those after it
    assert np.array_equal(trajectory.routes, want)
    episode.fork([9, 8])
    await episode.generate()
    first, second = episode.trajectories()
    assert np.array_equal(first.routes, want)
    assert np.array_equal(second.routes[:2], token_routes(second.token_ids)[:2])
    assert engine.requests[2].num_routed == 0


@in_event_loop
async def test_completions_beside_the_trajectory_leave_it_unchanged() -> None:
    episode = start(CountingEngine([4, 1]))
    await episode.complete([7, 8], max_new_tokens=4)
    assert (await episode.generate()).token_ids.tolist() == [104]
    assert episode.token_ids == (*PROMPT, 104)


@in_event_loop
async def test_requests_have_names_and_seeds_of_their_own() -> None:
    async def three_turns(seed: int | None) -> list[int | None]:
        engine = CountingEngine([1] * 3)
        episode = start(engine, seed=seed)
        for _ in range(3):
            await episode.generate()
        assert not episode.unfinished_requests
        assert [r.request_id for r in engine.requests] == ["step-5-2-1", "step-5-2-1.1", "step-5-2-1.2"]
        return [r.sampling.seed for r in engine.requests]

    assert await three_turns(None) == [None] * 3
    seeds = await three_turns(9)
    assert seeds[0] == 9
    assert len(set(seeds)) == 3
    assert seeds == await three_turns(9)
    assert seeds[1:] != (await three_turns(8))[1:]


@in_event_loop
async def test_all_that_follows_the_prompt_shares_max_new_tokens() -> None:
    engine = CountingEngine([4, 9, 9])
    episode = start(engine, max_new_tokens=8)
    generations = [await episode.generate(max_new_tokens=4)]
    episode.observe([50] * 3)
    assert episode.num_remaining_tokens == 1
    generations.append(await episode.generate())
    episode.observe([51])
    generations.append(await episode.generate())
    assert [r.sampling.max_new_tokens for r in engine.requests] == [4, 1]
    assert [len(g.token_ids) for g in generations] == [4, 1, 0]
    assert [g.finish_reason for g in generations] == ["stop", "length", "length"]
    trajectory = episode.trajectory()
    assert (trajectory.num_tokens, trajectory.finish_reason) == (len(PROMPT) + 8, "length")
    assert trajectory.num_tokens == episode.max_num_tokens


def test_text_is_observed_without_special_tokens(tokenizer: Any) -> None:
    episode = start(CountingEngine([]), tokenizer, max_new_tokens=40)
    text = f"the tool says 7{EOS}"
    episode.observe(text)
    observed = episode.token_ids[len(PROMPT) :]
    assert tokenizer.eos_token_id in tokenizer.encode(text)
    assert tokenizer.eos_token_id not in observed
    assert episode.decode(observed) == text
    episode.observe([tokenizer.eos_token_id])
    assert episode.token_ids[-1] == tokenizer.eos_token_id
    assert episode.decode(episode.token_ids[len(PROMPT) :]) == text


def test_observed_text_has_no_surrogates(tokenizer: Any) -> None:
    episode = start(CountingEngine([]), tokenizer, max_new_tokens=40)
    episode.observe("7\ud800 \udfff\ud83d")
    assert episode.decode(episode.token_ids[len(PROMPT) :]) == "7\ufffd \ufffd\ufffd"


@in_event_loop
async def test_forks_keep_each_sampled_token_in_one_sequence() -> None:
    engine = CountingEngine([2, 3, 4])
    episode = start(engine, max_new_tokens=8)
    episode.fork([40, 41])  # nothing was sampled: only the prompt changes
    await episode.generate()
    episode.add_turn_reward(0.5)
    episode.fork(episode.token_ids)  # the tokens so far: continues
    episode.observe([50])
    await episode.generate()
    episode.fork([60, 61, 62])
    assert episode.num_remaining_tokens == 3  # of 8, 5 were sampled
    await episode.generate()
    episode.add_turn_reward(1.0)
    first, second = episode.trajectories()
    assert first.token_ids.tolist() == [40, 41, 100, 101, 50, 102, 103, 104]
    assert second.token_ids.tolist() == [60, 61, 62, 105, 106, 107]
    assert (first.segment, second.segment) == (0, 1)
    assert (first.turn_rewards, second.turn_rewards) == ((0.5, 0.0), (1.0,))
    assert first.finish_reason == second.finish_reason == "length"
    assert first.loss_mask.sum() + second.loss_mask.sum() == 8 == engine.num_sampled
    assert engine.requests[2].token_ids == (60, 61, 62)


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


KWARGS, REFUSED = "rollout.agent.kwargs: my_agents:", "does not take these arguments:"


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("my_agents", {}, "rollout.agent.path needs package.module:agent, got 'my_agents'"),
        ("nowhere:run", {}, "rollout.agent.path: cannot import nowhere: No module named 'nowhere'"),
        ("my_agents:missing", {}, r"rollout.agent.path: module my_agents \(.*\) has no 'missing'"),
        ("my_agents:number", {}, "rollout.agent.path needs an async function or a class, got my_agents:number = 3"),
        ("my_agents:sync", {}, "rollout.agent.path needs an async function or a class, got my_agents:sync = "),
        ("my_agents:nothing", {}, r"rollout.agent.path: my_agents:nothing\(\) needs to take an episode: too many"),
        ("my_agents:two", {}, rf"{KWARGS}two\(episode, other\) {REFUSED} missing a required argument: 'other'"),
        ("my_agents:with_kwargs", {}, rf"{KWARGS}with_kwargs\(.*\) does not take .*: missing a required .*'turns'"),
        ("my_agents:with_kwargs", {"turns": 1, "turn": 2}, rf"{KWARGS}.* got an unexpected keyword argument 'turn'"),
        ("my_agents:plain", {"episode": 1}, r"rollout.agent.kwargs: .* multiple values for argument 'episode'"),
        ("my_agents:SyncRun", {}, r"rollout.agent.path needs a class with the method `async def run\(self, episode\)`"),
        ("my_agents:NoEpisode", {}, r"rollout.agent.path: my_agents:NoEpisode.run\(self\) needs to take an episode"),
        ("my_agents:WithSetUp", {"turn": 1}, rf"{KWARGS}WithSetUp\(.*\) does not take .*'turn'"),
    ],
)
def test_mistakes_are_found_without_running_the_agent(path: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_agent(AgentConfig(path=path, kwargs=kwargs))


def test_a_failing_constructor_is_reported() -> None:
    check_agent(AgentConfig(path="my_agents:Broken"))
    with expect_error(ConfigError, "rollout.agent.path", "my_agents:Broken", "OSError"):
        load_agent(AgentConfig(path="my_agents:Broken"))


def changing(change: Any) -> Any:
    """Return an agent that changes its trajectory."""

    async def agent(episode: Any) -> Any:
        return change(await single_turn(episode))

    return agent


def repeat_tokens(trajectory: Any) -> Any:
    per_token = ("token_ids", "loss_mask", "logprobs", "policy_versions")
    return replace(trajectory, **{name: np.repeat(getattr(trajectory, name), 9) for name in per_token})


async def raises(episode: Any) -> Any:
    await episode.generate()
    raise TimeoutError("the tool hangs")


returns_text = changing(lambda trajectory: "text")
changes_prompt = changing(lambda trajectory: replace(trajectory, prompt_id="d.jsonl:2"))
samples_first_token = changing(lambda t: replace(t, loss_mask=np.ones(t.num_tokens, np.bool_)))
logprobs_of_the_prompt = changing(lambda t: replace(t, logprobs=np.full(t.num_tokens, -0.5, np.float32)))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (returns_text, "needs to return a trajectory, got str on d.jsonl:1"),
        (changes_prompt, r"returned a trajectory that belongs to another prompt: .*'d.jsonl:1', 2\), got .*:2', 2\)"),
        (samples_first_token, "returned a trajectory that has no token before its first sampled one, on d.jsonl:1"),
        (changing(repeat_tokens), r"returned a .* too long: .* 3 \+ 20 = 23 tokens, got 45, on d.jsonl:1"),
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
    with expect_error(WorkerError, "long"):
        asyncio.run(run_agent(single_turn, start(RejectingEngine([])), path="x"))
