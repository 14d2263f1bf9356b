"""Environments and a reward that fail, hang or die in a tenth of their calls: baselines, rewards and limits."""

import asyncio
import random
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch.trajectory import Trajectory
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.reward import RewardsConfig
from megarl.functional import group_advantages
from megarl.reward.reward_scorer import RewardScorer
from megarl.rollout.environments.environment import Step, Task
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.reward_weights import RewardWeights
from megarl.run.rollout_batch import RolloutBatch
from tests.rollout.environments.chat_templates import APPEND, chat_tokenizer
from tests.rollout.environments.scripted import TextEngine, make_job, make_worker
from tests.run.finished_groups import run_config
from tests.virtual_time import run_in_virtual_time

NUM_GROUPS, GROUP_SIZE, SHARE = 40, 8, 0.1
LIMIT = 30.0

state: Counter[str] = Counter()
waits: list[float] = []


class DeadEnvironmentError(Exception):
    """The process of the environment is gone."""


async def quality(trajectory: Trajectory, text: str, row: Any) -> float:
    """Return 10, or fail, hang for ever, or lose its process in a tenth of the calls, each for a random completion."""
    scorer_faults = random.Random(state["scored"])
    state["scored"] += 1
    kind = scorer_faults.choice(["fail", "hang", "die"])
    if scorer_faults.random() < SHARE:
        state[f"score {kind}"] += 1
        if kind == "hang":
            await asyncio.sleep(1e9)
        raise BrokenProcessPool(kind) if kind == "die" else OSError(kind)
    return 10.0


QUALITY = {"type": "python", "path": f"{__name__}:quality", "on_error": "drop", "timeout_seconds": LIMIT}
REWARDS = {"terms": {"game": {"type": "environment"}, "quality": QUALITY}}


class Faulty:
    """Fails, hangs for ever, or dies in a tenth of its resets, steps and closes, by the seed of the episode."""

    def __init__(self) -> None:
        self.random, self.is_dead, self.num_steps = random.Random(0), False, 0
        state["created"] += 1

    async def reset(self, task: Task) -> None:
        self.random = random.Random(task.seed)
        await self._fault("reset")

    async def step(self, reply: str) -> Step:
        await self._fault("step")
        self.num_steps += 1
        if self.num_steps < 2:
            return Step(messages=[{"role": "tool", "content": "why"}])
        return Step(reward=self.random.choice([1.0, 2.0, 3.0]), done=True)  # no reward of its own is 0

    async def close(self) -> None:
        state["closed"] += 1
        await self._fault("close")

    async def _fault(self, name: str) -> None:
        if self.is_dead:
            raise DeadEnvironmentError(name)
        await asyncio.sleep(0.1)
        kind = self.random.choice(["fail", "hang", "die"])
        if self.random.random() >= SHARE:
            return
        state[f"{name} {kind}"] += 1
        if kind == "hang":
            began = asyncio.get_running_loop().time()
            try:
                await asyncio.sleep(1e9)
            finally:
                waits.append(asyncio.get_running_loop().time() - began)
        self.is_dead = kind == "die"
        raise DeadEnvironmentError(name) if self.is_dead else OSError(name)


@pytest.fixture(scope="module")
def finished() -> list[FinishedGroup]:
    state.clear()
    waits.clear()
    tokenizer = chat_tokenizer(APPEND)
    engine = TextEngine(tokenizer, lambda text, request_id: "yes", seconds=1.0)
    worker = make_worker(
        engine, Faulty, scorer=RewardScorer(RewardsConfig.model_validate(REWARDS), tokenizer.decode), max_seconds=LIMIT
    )

    async def main() -> list[FinishedGroup]:
        jobs = [make_job(tokenizer, num_samples=GROUP_SIZE, number=n) for n in range(1, NUM_GROUPS + 1)]
        results = await asyncio.gather(*map(worker.rollout_group, jobs))
        state["tasks left"] = len(asyncio.all_tasks()) - 1
        return [FinishedGroup(summary, LocalPayload(trajectories)) for summary, trajectories in results]

    return run_in_virtual_time(main())


def test_all_kinds_of_faults_were_injected(finished: list[FinishedGroup]) -> None:
    kinds = {f"{name} {kind}" for name in ("reset", "step", "close", "score") for kind in ("fail", "hang", "die")}
    assert kinds <= state.keys()


def test_no_call_waits_past_the_limit_of_its_episode(finished: list[FinishedGroup]) -> None:
    assert waits
    assert max(waits) <= LIMIT


def test_every_environment_is_closed_and_no_task_is_left(finished: list[FinishedGroup]) -> None:
    assert state["closed"] == state["created"] >= NUM_GROUPS * GROUP_SIZE
    assert state["tasks left"] == 0


def test_failed_episodes_are_repeated_once_then_left_out(finished: list[FinishedGroup]) -> None:
    summaries = [each for group in finished for each in group.summary.trajectories]
    dropped = [each for each in summaries if each.is_dropped]
    terms = [group.summary.terms for group in finished if group.summary.terms]
    retried = {name: sum(t[name].num_retried for t in terms if name in t) for name in ("environment", "quality")}
    assert 0 < len(dropped) < sum(retried.values()) < len(summaries)
    assert state["created"] == len(summaries) + retried["environment"]
    without_environment = [each for each in dropped if "environment" in each.reward_errors]
    assert all("test_faults:Faulty" in each.reward_errors["environment"] for each in without_environment)
    assert state["scored"] == len(summaries) - len(without_environment) + retried["quality"]
    assert {name for each in dropped for name in each.reward_errors} == {"environment", "quality"}
    assert {sum(each.rewards.values()) for each in summaries if not each.is_dropped} == {11.0, 12.0, 13.0}  # no zero


def test_baselines_are_those_without_the_failed_episodes(finished: list[FinishedGroup]) -> None:
    weights = RewardWeights(run_config({"type": "grpo"}, reward=REWARDS), {}, writes=False)
    batch = RolloutBatch.from_sampled([weights.sum_up(group) for group in finished], min_completions=2)
    got = group_advantages(torch.tensor(batch.rewards), torch.tensor(batch.group_ids), kind="grpo")
    expected: list[float] = []
    for group in finished:
        rewards = np.array([sum(t.rewards.values()) for t in group.payload.fetch() if not t.reward_errors])
        if len(rewards) >= 2:
            expected += ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)).tolist()
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-6)
    exact = group_advantages(torch.tensor(batch.rewards).double(), torch.tensor(batch.group_ids), kind="dr_grpo")
    means = [np.mean([sum(t.rewards.values()) for t in g.payload.fetch() if not t.reward_errors]) for g in batch.groups]
    centred = [r - means[g] for r, g in zip(batch.rewards, batch.group_ids, strict=True)]
    np.testing.assert_allclose(exact.numpy(), centred, rtol=0, atol=1e-7)


def test_an_episode_is_the_same_in_every_run() -> None:
    """A second attempt has another seed: otherwise it would fail again."""
    tokenizer = chat_tokenizer(APPEND)
    engine = TextEngine(tokenizer, lambda text, request_id: "yes", seconds=1.0)
    job = make_job(tokenizer, num_samples=GROUP_SIZE, number=1)
    workers = [make_worker(engine, Faulty, max_seconds=LIMIT) for _ in range(2)]
    first, second = (run_in_virtual_time(worker.rollout_group(job)) for worker in workers)
    assert first[0].trajectories == second[0].trajectories
    seeds = {request.request_id: request.sampling.seed for request in engine.requests}
    assert len(set(seeds.values())) == len(seeds)
