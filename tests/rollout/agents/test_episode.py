"""An episode: which tokens are sampled and which observed, its requests, its limits, and its way through packing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch.pack import pack
from megarl.batch.trajectory import Prompt
from megarl.data.tiny_checkpoint import EOS, train_tokenizer
from megarl.rollout.agents.episode import Episode
from megarl.rollout.engine import Generation, GenerationRequest, Sampling
from tests.rollout.whole_batches import WholeBatches, make_generation

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

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        length = self.lengths.pop(0)
        count = np.arange(self.num_sampled, self.num_sampled + min(length, request.sampling.max_new_tokens))
        self.num_sampled += len(count)
        return make_generation(
            100 + count, -1.0 - count, 3, "stop" if length <= request.sampling.max_new_tokens else "length"
        )


def start(engine: Any, tokenizer: Any = None, *, max_new_tokens: int = 20, seed: int | None = None) -> Episode:
    prompt = Prompt(prompt_id="d.jsonl:1", text="", token_ids=PROMPT, row={"level": 2}, answer="7")
    sampling = Sampling(temperature=1.0, max_new_tokens=max_new_tokens, seed=seed)
    return Episode(prompt, tokenizer, engine, sampling, request_id="step-5-2-1", group_id=2)


def test_sampled_tokens_are_trained_on_once_and_observed_ones_never() -> None:
    engine = CountingEngine([2, 3])
    episode = start(engine)

    async def two_turns() -> None:
        await episode.generate()
        episode.observe([50, 51, 52, 53])
        await episode.generate()
        episode.observe([54])

    asyncio.run(two_turns())
    assert engine.requests[1].token_ids == (*PROMPT, 100, 101, 50, 51, 52, 53)
    trajectory = episode.trajectory()
    assert (
        trajectory.token_ids.tolist() == [*PROMPT, 100, 101, 50, 51, 52, 53, 102, 103, 104, 54] == [*episode.token_ids]
    )
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 4 + [True] * 3 + [False]
    assert trajectory.logprobs.tolist() == [0.0] * 3 + [-1.0, -2.0] + [0.0] * 4 + [-3.0, -4.0, -5.0] + [0.0]
    assert trajectory.policy_versions.tolist() == [-1] * 3 + [3] * 2 + [-1] * 4 + [3] * 3 + [-1]
    assert (trajectory.prompt_length, trajectory.finish_reason) == (3, "stop")

    packed = pack([trajectory, trajectory], multiple=4, sequence_multiple=2)
    trained = packed.target_ids_T[packed.mask_T].tolist()
    assert trained == [100, 101, 102, 103, 104] * 2
    assert packed.rollout_logprobs_T[packed.mask_T].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0] * 2
    assert packed.rollout_logprobs_T[~packed.mask_T].abs().sum() == 0
    assert set(packed.sequence_tokens_T[packed.mask_T].tolist()) == {5.0}
    # the input of a trained position is the token before its target: also the last observed one
    assert packed.token_ids_T[packed.mask_T].tolist() == [42, 100, 53, 102, 103] * 2
    assert torch.equal(packed.target_ids_T[packed.mask_T][:5], packed.token_ids_T[packed.mask_T.roll(1)][:5])


def test_completions_beside_the_trajectory_leave_it_unchanged() -> None:
    episode = start(CountingEngine([4, 1]))

    async def run() -> Generation:
        await episode.complete([7, 8], max_new_tokens=4)
        return await episode.generate()

    assert asyncio.run(run()).token_ids.tolist() == [104]
    assert episode.token_ids == (*PROMPT, 104)


def test_requests_have_names_and_seeds_of_their_own() -> None:
    def requests(seed: int | None) -> list[GenerationRequest]:
        engine = CountingEngine([1] * 3)
        episode = start(engine, seed=seed)

        async def three_turns() -> None:
            for _ in range(3):
                await episode.generate()

        asyncio.run(three_turns())
        assert not episode.unfinished_requests
        return engine.requests

    assert [r.request_id for r in requests(None)] == ["step-5-2-1", "step-5-2-1.1", "step-5-2-1.2"]
    assert [r.sampling.seed for r in requests(None)] == [None] * 3
    seeds = [r.sampling.seed for r in requests(9)]
    assert seeds[0] == 9
    assert len(set(seeds)) == 3
    assert seeds == [r.sampling.seed for r in requests(9)]
    assert seeds[1:] != [r.sampling.seed for r in requests(8)][1:]


def test_all_that_follows_the_prompt_shares_max_new_tokens() -> None:
    engine = CountingEngine([4, 9, 9])
    episode = start(engine, max_new_tokens=8)

    async def run() -> list[Generation]:
        first = await episode.generate(max_new_tokens=4)
        episode.observe([50] * 3)
        assert episode.num_remaining_tokens == 1
        second = await episode.generate()
        episode.observe([51])
        return [first, second, await episode.generate()]

    generations = asyncio.run(run())
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


def test_forks_keep_each_sampled_token_in_one_sequence() -> None:
    engine = CountingEngine([2, 3, 4])
    episode = start(engine, max_new_tokens=8)

    async def forking() -> None:
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

    asyncio.run(forking())
    first, second = episode.trajectories()
    assert first.token_ids.tolist() == [40, 41, 100, 101, 50, 102, 103, 104]
    assert second.token_ids.tolist() == [60, 61, 62, 105, 106, 107]
    assert (first.segment, second.segment) == (0, 1)
    assert (first.turn_rewards, second.turn_rewards) == ((0.5, 0.0), (1.0,))
    assert first.finish_reason == second.finish_reason == "length"
    assert first.loss_mask.sum() + second.loss_mask.sum() == 8 == engine.num_sampled
    assert engine.requests[2].token_ids == (60, 61, 62)
