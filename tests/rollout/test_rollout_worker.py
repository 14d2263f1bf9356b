"""A worker's groups, whose completions equal those that no loss of an engine interrupts."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from megarl.batch.trajectory import ScoredGroup, TermReport
from megarl.engines import engine_pool
from megarl.engines.engine import UNFINISHED, Generation, GenerationRequest, Sampling, tokens_from
from megarl.engines.engine_pool import PooledEngine
from megarl.errors import AgentError, LostEngineError, RewardError, WorkerError
from megarl.rollout import rollout_worker
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.rollout_worker import RolloutWorker, RolloutWorkerSpec, SourceAgent
from tests.errors import expect_error
from tests.rollout.clock import LOOP_CLOCK, in_virtual_time
from tests.rollout.whole_batches import NoScores, WholeBatches, make_generation, make_group_job
from tests.time_limits import UNREACHED_SECONDS
from tests.virtual_time import run_in_virtual_time


@dataclass
class FakeEngine(WholeBatches):
    """Generates the prompt's last token, sample index + 1 times, after `seconds`."""

    seconds: float = 0.0
    calls: list[list[str]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    error: Exception | None = None

    async def generate_many(self, requests):
        self.calls.append([r.request_id for r in requests])
        self.seeds += [r.sampling.seed for r in requests]
        await asyncio.sleep(self.seconds)
        if self.gate:
            await self.gate.wait()
        if self.error:
            raise self.error
        return [self._generation(r) for r in requests]

    async def abort(self, request_id):
        self.aborted.append(request_id)

    def _generation(self, request):
        sample, _, turn = request.request_id.rpartition("-")[2].partition(".")
        k = int(sample) + 1 + int(turn or 0)
        return make_generation([request.token_ids[-1]] * k, versions=range(k))


async def two_turns(episode):
    await episode.generate(max_new_tokens=1)
    episode.observe([8])
    await episode.generate(max_new_tokens=2)
    return episode.trajectory()


class LengthScorer:
    async def score(self, trajectories, prompt):
        assert {t.prompt_id for t in trajectories} == {prompt.prompt_id}
        rewards = [{"length": float(t.loss_mask.sum()), "one": 1.0} for t in trajectories]
        scored = [replace(t, rewards=terms) for t, terms in zip(trajectories, rewards, strict=True)]
        return ScoredGroup(trajectories=scored, terms={"length": TermReport(seconds=0.5, num_retried=1)})


def job(group_id=3, **changes):
    return make_group_job(group_id=group_id, max_new_tokens=8, request_id=f"1-{group_id}", **{"seed": (), **changes})


def worker(*engines, seconds=1e6, scorer=None, agent=single_turn):
    spec = RolloutWorkerSpec(request_timeout_seconds=seconds, agent=agent)
    return RolloutWorker(spec, engines, scorer or LengthScorer(), tokenizer=None)


def test_group_is_sampled_scored_and_summarized():
    engine = FakeEngine()
    summary, (first, second) = run_in_virtual_time(worker(engine).rollout_group(job()))
    assert engine.calls == [["1-3-0", "1-3-1"]]  # one call
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5, 6, 7, 7], [5, 6, 7, 7, 7])
    assert second.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert second.logprobs.tolist() == [0.0] * 3 + [-0.5] * 2
    assert second.policy_versions.tolist() == [-1] * 3 + [0, 1]
    assert second.rewards == {"length": 2.0, "one": 1.0}
    assert first.group_id == second.group_id == 3
    assert (summary.group_id, summary.prompt_id) == (3, "train.jsonl:3")
    last = summary.trajectories[1]
    assert (last.num_tokens, last.prompt_length, last.response_length) == (5, 3, 2)
    assert (last.rewards, last.finish_reason) == ({"length": 2.0, "one": 1.0}, "stop")
    assert last.tokens_by_version == ((0, 1), (1, 1))


def test_generation_and_scoring_are_timed_apart(monkeypatch):
    class SlowScorer(LengthScorer):
        async def score(self, trajectory, prompt):
            await asyncio.sleep(5)
            return await super().score(trajectory, prompt)

    monkeypatch.setattr(rollout_worker, "time", LOOP_CLOCK)
    summary, _ = run_in_virtual_time(worker(FakeEngine(seconds=30), scorer=SlowScorer()).rollout_group(job()))
    assert (round(summary.generation_seconds, 6), round(summary.scoring_seconds, 6)) == (30, 5)


@in_virtual_time
async def test_groups_go_to_the_engine_with_the_fewest_outstanding_samples():
    gates = [asyncio.Event(), asyncio.Event()]
    engines = [FakeEngine(gate=gate) for gate in gates]
    w = worker(*engines)
    large = asyncio.create_task(w.rollout_group(job(group_id=1, num_samples=5)))
    await asyncio.sleep(0)
    small = [asyncio.create_task(w.rollout_group(job(group_id=i, num_samples=2))) for i in (2, 3, 4)]
    await asyncio.sleep(0.01)
    groups = [{r.split("-")[1] for call in e.calls for r in call} for e in engines]
    assert groups == [{"1"}, {"2", "3", "4"}]
    gates[1].set()
    await asyncio.gather(*small)
    later = asyncio.create_task(w.rollout_group(job(group_id=5)))
    await asyncio.sleep(0.01)
    assert engines[1].calls[-1] == ["1-5-0", "1-5-1"]
    gates[0].set()
    await asyncio.gather(large, later)


def columns(trajectories):
    return [(t.token_ids.tolist(), t.logprobs.tolist(), t.finish_reason) for t in trajectories]


@in_virtual_time
async def test_lost_engine_requests_are_retried_with_the_same_ids_and_seeds():
    seeded = job(num_samples=3, seed=(1, 2))
    expected, uninterrupted = await worker(FakeEngine()).rollout_group(seeded)
    lost, other = FakeEngine(seconds=0.02, error=LostEngineError("SIGKILL")), FakeEngine()
    w = worker(lost, other)
    summary, trajectories = await w.rollout_group(seeded)
    assert (summary.trajectories, columns(trajectories)) == (expected.trajectories, columns(uninterrupted))
    assert lost.calls == other.calls == [["1-3-0", "1-3-1", "1-3-2"]]
    assert lost.seeds == other.seeds
    assert len(set(other.seeds)) == 3
    assert summary.num_retried == 3
    await w.rollout_group(job(group_id=4))
    assert len(lost.calls) == 1  # the lost engine gets no more requests
    assert w.pool.outstanding == [0, 0]


@in_virtual_time
async def test_stale_reply_of_a_lost_engine_is_dropped():
    gate = asyncio.Event()
    slow, other = FakeEngine(gate=gate), FakeEngine()
    w = worker(slow, other)
    group = asyncio.create_task(w.rollout_group(job()))
    await asyncio.sleep(0.01)
    await w.update_engines({0: LostEngineError("no reply to a ping")})
    summary, _ = await group
    assert [t.response_length for t in summary.trajectories] == [1, 2]
    assert (slow.calls, other.calls) == ([["1-3-0", "1-3-1"]], [["1-3-0", "1-3-1"]])
    gate.set()
    await asyncio.sleep(0.01)
    assert summary.num_retried == 2
    await w.update_engines({0: FakeEngine()})
    again, _ = await w.rollout_group(job())
    assert (again.trajectories, again.num_retried) == (summary.trajectories, 0)


@in_virtual_time
async def test_engines_that_are_lost_and_restarted_together_are_changed_by_one_call():
    gate = asyncio.Event()
    first, second, restarted = FakeEngine(gate=gate), FakeEngine(gate=gate), FakeEngine()
    w = worker(first, second)
    groups = [asyncio.create_task(w.rollout_group(job(group_id=i))) for i in (1, 2)]
    await asyncio.sleep(0.01)
    await w.update_engines({0: LostEngineError("a node was lost"), 1: restarted})
    await asyncio.gather(*groups)
    assert sorted(r for call in restarted.calls for r in call) == ["1-1-0", "1-1-1", "1-2-0", "1-2-1"]


@in_virtual_time
async def test_request_timeout_starts_once_an_engine_is_live():
    restarted = FakeEngine(seconds=0.05)
    w = worker(FakeEngine(error=LostEngineError("SIGKILL")), seconds=0.2)
    groups = [asyncio.create_task(w.rollout_group(job(group_id=i))) for i in (1, 2)]
    await asyncio.sleep(0.4)
    assert not any(group.done() for group in groups)
    await w.update_engines({0: restarted})
    for group, (summary, _) in zip((1, 2), await asyncio.gather(*groups), strict=True):
        assert summary.group_id == group
    assert sorted(r for call in restarted.calls for r in call) == ["1-1-0", "1-1-1", "1-2-0", "1-2-1"]


@in_virtual_time
async def test_worker_may_start_without_engines():
    w = worker(None, seconds=5)
    group = asyncio.create_task(w.rollout_group(job()))
    await asyncio.sleep(0.01)
    await w.update_engines({0: FakeEngine()})
    summary, _ = await group
    assert summary.num_retried == 0


@in_virtual_time
async def test_a_second_turn_over_the_limit_is_aborted():
    class SlowSecondTurn(FakeEngine):
        async def generate_many(self, requests):
            self.seconds = 10.0 if self.calls else 0.0
            return await super().generate_many(requests)

    engine = SlowSecondTurn()
    _, (trajectory,) = await worker(engine, seconds=0.05, agent=two_turns).rollout_group(job(num_samples=1))
    assert engine.aborted == ["1-3-0.1"]
    assert (trajectory.loss_mask.sum(), trajectory.rewards["length"]) == (
        1 + 2,
        3,
    )  # the engine answers in time, with `stop`


async def broken(episode):
    raise KeyError("answer")


class BrokenScorer:
    async def score(self, trajectories, prompt):
        raise RewardError("accuracy raised")


@pytest.mark.parametrize(
    ("engine", "options", "error", "message"),
    [
        (FakeEngine(error=WorkerError("out of memory")), {}, WorkerError, "out of memory"),
        (FakeEngine(), {"agent": broken}, AgentError, r"raised KeyError: 'answer' .* on train.jsonl:3"),
        (FakeEngine(), {"scorer": BrokenScorer()}, RewardError, "accuracy raised"),
    ],
    ids=["call", "agent", "reward"],
)
def test_errors_fail_the_group(engine, options, error, message):
    with pytest.raises(error, match=message):
        run_in_virtual_time(worker(engine, FakeEngine(), **options).rollout_group(job()))


def make_requests(count):
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    return [GenerationRequest(request_id=f"r-{i}", token_ids=(i,), sampling=sampling) for i in range(count)]


@in_virtual_time
async def test_only_requests_of_the_same_loop_iteration_are_batched():
    wrapped, requests = FakeEngine(), make_requests(3)
    engine = PooledEngine(wrapped)
    first = await asyncio.gather(engine.generate(requests[0]), engine.generate(requests[1]))
    second = await engine.generate(requests[2])
    assert wrapped.calls == [["r-0", "r-1"], ["r-2"]]
    assert [g.token_ids[0] for g in (*first, second)] == [0, 1, 2]


@in_virtual_time
async def test_cancelled_caller_does_not_affect_the_others():
    engine = PooledEngine(FakeEngine(seconds=0.05))
    cancelled, remaining = [asyncio.create_task(engine.generate(request)) for request in make_requests(2)]
    await asyncio.sleep(0.01)
    cancelled.cancel()
    assert (await remaining).token_ids[0] == 1


def test_a_source_has_its_own_agent():
    turns = SourceAgent(agent=two_turns, path="games:Chess", key="data.sources.games.env.path")
    failing = SourceAgent(agent=broken, path="games:Go", key="data.sources.go.env.path")
    spec = RolloutWorkerSpec(request_timeout_seconds=5.0, source_agents={"games": turns, "go": failing})
    w = RolloutWorker(spec, [FakeEngine()], LengthScorer(), tokenizer=None)

    plain = job(num_samples=1)

    def of(source):
        return replace(plain, prompt=replace(plain.prompt, source=source))

    for source, num_requests in (("math", 1), ("games", 2)):
        _, (trajectory,) = run_in_virtual_time(w.rollout_group(of(source)))
        assert int(np.sum(np.diff(trajectory.loss_mask.astype(int)) == 1)) == num_requests
    with expect_error(AgentError, "data.sources.go.env.path (games:Go)", "KeyError"):
        run_in_virtual_time(w.rollout_group(of("go")))


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
        tokens, noises, reason = list[int](), list[float](), UNFINISHED
        while reason == UNFINISHED:
            if self.dies_after is not None and len(tokens) >= self.dies_after:
                raise LostEngineError("SIGKILL")
            noises.append(noise(request.sampling.seed or 0, len(request.token_ids) + len(tokens)))
            tokens.append(0 if noises[-1] < 0.02 else 1 + int(noises[-1] * 200))
            if tokens[-1] == 0:
                reason = "stop"
            elif len(tokens) == request.sampling.max_new_tokens:
                reason = "length"
            self.parts[request.request_id] = make_generation(tokens, -np.array(noises), self.version, reason)
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


def rollout(*engines, restarts=(), num_samples=8, agent=None):
    """Return the summary and the trajectories of one group; `restarts` replace the first engine, one after another."""
    spec = RolloutWorkerSpec(request_timeout_seconds=UNREACHED_SECONDS, **({"agent": agent} if agent else {}))
    job = make_group_job(num_samples=num_samples, max_new_tokens=MAX_NEW_TOKENS, seed=(1, 2), request_id="1-3")

    async def main():
        worker = RolloutWorker(spec, engines, NoScores(), tokenizer=None)
        group = asyncio.create_task(worker.rollout_group(job))
        for engine in restarts:
            while worker.pool.live(0) is not None:
                await asyncio.sleep(TOKEN_SECONDS)
            await worker.update_engines({0: engine})
        return await group

    return run_in_virtual_time(main())


@pytest.fixture
def report_each_token(monkeypatch):
    monkeypatch.setattr(engine_pool, "REPORT_SECONDS", TOKEN_SECONDS / 4)


@pytest.mark.parametrize("dies_after", [0, 1, 7, 20, MAX_NEW_TOKENS - 1])
def test_completions_continue_on_another_engine(dies_after, report_each_token):
    _, expected = rollout(SeededEngine())
    lost, other = SeededEngine(version=1, dies_after=dies_after), SeededEngine(version=2)
    summary, trajectories = rollout(lost, other)
    assert columns(trajectories) == columns(expected)
    assert all(np.all(np.diff(t.policy_versions[t.loss_mask]) >= 0) for t in trajectories)
    assert summary.num_retried == len(other.requests)
    kept = sum(len(request.token_ids) - 3 for request in other.requests)
    assert summary.num_kept_tokens == kept
    assert kept > 0 or dies_after < 7
    by_id = {request.request_id: request for request in lost.requests}
    for request in other.requests:
        assert request.sampling.seed == by_id[request.request_id].sampling.seed
        assert len(request.token_ids) - 3 + request.sampling.max_new_tokens == MAX_NEW_TOKENS


def test_completions_survive_several_losses(report_each_token):
    _, expected = rollout(SeededEngine())
    lost = [SeededEngine(version=v, dies_after=5) for v in range(1, 6)]
    summary, trajectories = rollout(lost[0], restarts=[*lost[1:], SeededEngine(version=6)])
    assert columns(trajectories) == columns(expected)
    assert summary.num_retried > 5
    assert len({int(v) for t in trajectories for v in t.policy_versions[t.loss_mask]}) > 2


def test_what_was_not_reported_is_sampled_again():
    """Reports come every few seconds: an engine that is lost before the first one has reported nothing."""
    _, expected = rollout(SeededEngine())
    lost, other = SeededEngine(version=1, dies_after=10), SeededEngine(version=2)
    summary, trajectories = rollout(lost, other)
    assert columns(trajectories) == columns(expected)
    assert summary.num_kept_tokens == lost.num_reports == 0
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
    summary, trajectories = rollout(lost, other, agent=two_turns, num_samples=2)
    assert columns(trajectories) == columns(expected)
    assert len(calls) == 4
    assert summary.num_retried == 2
    assert {request.request_id for request in other.requests} == {"1-3-0.1", "1-3-1.1"}
