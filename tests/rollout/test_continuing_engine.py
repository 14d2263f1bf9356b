"""Completions that are interrupted by the loss of their engine equal those that are not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import numpy as np
import pytest

from megarl.errors import LostEngineError
from megarl.rollout import partial_outputs
from megarl.rollout.continuation import tokens_from
from megarl.rollout.engine import UNFINISHED, Generation, GenerationRequest
from megarl.rollout.rollout_worker import RolloutWorker, RolloutWorkerSpec
from tests.rollout.whole_batches import NoScores, WholeBatches, make_generation, make_group_job
from tests.time_limits import UNREACHED_SECONDS
from tests.virtual_time import run_in_virtual_time

MAX_NEW_TOKENS = 40
TOKEN_SECONDS = 1e-3


def noise(seed: int, position: int) -> float:
    """Return the noise of a seed at a position of the sequence, which is all that a token depends on here."""
    return random.Random(f"{seed} {position}").random()


class SeededEngine(WholeBatches):
    """Samples tokens one after another from seed and position; token 0 ends a completion."""

    def __init__(self, version: int = 0, dies_after: int | None = None) -> None:
        self.version, self.dies_after = version, dies_after
        self.requests: list[GenerationRequest] = []
        self.parts: dict[str, Generation] = {}
        self.num_reports = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        tokens: list[int] = []
        reason = UNFINISHED
        while reason == UNFINISHED:
            if self.dies_after is not None and len(tokens) >= self.dies_after:
                raise LostEngineError("SIGKILL")
            value = noise(request.sampling.seed or 0, len(request.token_ids) + len(tokens))
            tokens.append(0 if value < 0.02 else 1 + int(value * 200))
            if tokens[-1] == 0:
                reason = "stop"
            elif len(tokens) == request.sampling.max_new_tokens:
                reason = "length"
            self.parts[request.request_id] = self._generation(request, tokens, reason)
            if reason == UNFINISHED:
                await asyncio.sleep(TOKEN_SECONDS)
        return self.parts.pop(request.request_id)

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        self.num_reports += 1
        return {
            request_id: tokens_from(part, known[request_id])
            for request_id, part in self.parts.items()
            if request_id in known and len(part.token_ids) > known[request_id]
        }

    def _generation(self, request: GenerationRequest, tokens: list[int], reason: str) -> Generation:
        start, seed = len(request.token_ids), request.sampling.seed or 0
        return make_generation(tokens, [-noise(seed, start + i) for i in range(len(tokens))], self.version, reason)


def rollout(*engines, restarts=(), num_samples=8, agent=None):
    """Return the worker and the trajectories of one group; `restarts` replace the first engine, one after another."""
    spec = RolloutWorkerSpec(request_timeout_seconds=UNREACHED_SECONDS, **({"agent": agent} if agent else {}))
    job = make_group_job(num_samples=num_samples, max_new_tokens=MAX_NEW_TOKENS, seed=(1, 2), request_id="1-3")

    async def main():
        worker = RolloutWorker(spec, engines, NoScores(), tokenizer=None)
        group = asyncio.create_task(worker.rollout_group(job))
        for engine in restarts:
            while worker._pool.live(0) is not None:
                await asyncio.sleep(TOKEN_SECONDS)
            await worker.replace_engine(0, engine)
        summary, trajectories = await group
        counts = await worker.retry_counts()
        assert (summary.num_retried, summary.num_kept_tokens) == (counts.num_retried, counts.num_kept_tokens)
        return counts, trajectories

    return run_in_virtual_time(main())


def columns(trajectories):
    return [(t.token_ids.tolist(), t.logprobs.tolist(), t.finish_reason) for t in trajectories]


@pytest.fixture
def report_each_token(monkeypatch):
    monkeypatch.setattr(partial_outputs, "REPORT_SECONDS", TOKEN_SECONDS / 4)


@pytest.mark.parametrize("dies_after", [0, 1, 7, 20, MAX_NEW_TOKENS - 1])
def test_completions_continue_on_another_engine(dies_after, report_each_token):
    _, expected = rollout(SeededEngine())
    lost, other = SeededEngine(version=1, dies_after=dies_after), SeededEngine(version=2)
    counts, trajectories = rollout(lost, other)
    assert columns(trajectories) == columns(expected)
    for trajectory in trajectories:
        versions = trajectory.policy_versions[trajectory.loss_mask]
        assert np.all(np.diff(versions) >= 0)
    assert counts.num_retried == len(other.requests)
    kept = sum(len(request.token_ids) - 3 for request in other.requests)
    assert counts.num_kept_tokens == kept
    assert kept > 0 or dies_after < 7
    by_id = {request.request_id: request for request in lost.requests}
    for request in other.requests:
        assert request.sampling.seed == by_id[request.request_id].sampling.seed
        assert len(request.token_ids) - 3 + request.sampling.max_new_tokens == MAX_NEW_TOKENS


def test_completions_survive_several_losses(report_each_token):
    _, expected = rollout(SeededEngine())
    lost = [SeededEngine(version=v, dies_after=5) for v in range(1, 6)]
    counts, trajectories = rollout(lost[0], restarts=[*lost[1:], SeededEngine(version=6)])
    assert columns(trajectories) == columns(expected)
    assert counts.num_retried > 5
    assert len({int(v) for t in trajectories for v in t.policy_versions[t.loss_mask]}) > 2


def test_what_was_not_reported_is_sampled_again():
    """Reports come every few seconds: an engine that is lost before the first one has reported nothing."""
    _, expected = rollout(SeededEngine())
    lost, other = SeededEngine(version=1, dies_after=10), SeededEngine(version=2)
    counts, trajectories = rollout(lost, other)
    assert columns(trajectories) == columns(expected)
    assert counts.num_kept_tokens == lost.num_reports == 0
    assert {int(v) for t in trajectories for v in t.policy_versions[t.loss_mask]} <= {1, 2}
    assert all(len(request.token_ids) == 3 for request in other.requests)


def test_later_turns_of_an_agent_continue(report_each_token):
    """The turns before are not repeated, and the agent does not notice."""
    calls = []

    async def two_turns(episode):
        calls.append(episode)
        await episode.generate(max_new_tokens=4)
        episode.observe([8, 9])
        await episode.generate(max_new_tokens=30)
        return episode.trajectory()

    _, expected = rollout(SeededEngine(), agent=two_turns, num_samples=2)
    lost, other = SeededEngine(version=1, dies_after=10), SeededEngine(version=2)
    counts, trajectories = rollout(lost, other, agent=two_turns, num_samples=2)
    assert columns(trajectories) == columns(expected)
    assert len(calls) == 4
    assert counts.num_retried == 2
    assert {request.request_id for request in other.requests} == {"1-3-0.1", "1-3-1.1"}
