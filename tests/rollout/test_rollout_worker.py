import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from megarl.batch.scored_group import ScoredGroup, TermReport
from megarl.errors import AgentError, LostEngineError, RewardError, WorkerError
from megarl.rollout import rollout_worker
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.batching_engine import BatchingEngine
from megarl.rollout.engine import GenerationRequest, Sampling
from megarl.rollout.rollout_worker import RetryCounts, RolloutWorker, RolloutWorkerSpec, SourceAgent
from tests.rollout.clock import LOOP_CLOCK, in_virtual_time
from tests.rollout.whole_batches import WholeBatches, make_generation, make_group_job
from tests.virtual_time import run_in_virtual_time

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8)


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
        lengths = [float(t.loss_mask.sum()) for t in trajectories]
        scored = [
            replace(t, rewards={"length": length, "one": 1.0}, reward=length + 0.5)
            for t, length in zip(trajectories, lengths, strict=True)
        ]
        return ScoredGroup(trajectories=scored, terms={"length": TermReport(seconds=0.5, num_retried=1)})


def job(group_id=3, num_samples=2, seed=()):
    return make_group_job(
        group_id=group_id, num_samples=num_samples, max_new_tokens=8, seed=seed, request_id=f"1-{group_id}"
    )


def worker(*engines, seconds=1e6, scorer=None, agent=single_turn):
    spec = RolloutWorkerSpec(request_timeout_seconds=seconds, agent=agent)
    return RolloutWorker(spec, engines, scorer or LengthScorer(), tokenizer=None)


def test_group_is_sampled_scored_and_summarized():
    engine = FakeEngine()
    summary, trajectories = run_in_virtual_time(worker(engine).rollout_group(job()))
    assert engine.calls == [["1-3-0", "1-3-1"]]  # one call
    assert [t.token_ids.tolist() for t in trajectories] == [[5, 6, 7, 7], [5, 6, 7, 7, 7]]
    assert trajectories[1].loss_mask.tolist() == [False] * 3 + [True] * 2
    assert trajectories[1].logprobs.tolist() == [0.0] * 3 + [-0.5] * 2
    assert trajectories[1].policy_versions.tolist() == [-1] * 3 + [0, 1]
    assert trajectories[1].rewards == {"length": 2.0, "one": 1.0}
    assert trajectories[1].reward == 2.5
    assert {t.group_id for t in trajectories} == {3}
    assert (summary.group_id, summary.prompt_id) == (3, "train.jsonl:3")
    last = summary.trajectories[1]
    assert (last.num_tokens, last.prompt_length, last.response_length) == (5, 3, 2)
    assert (last.reward, last.rewards, last.finish_reason) == (2.5, {"length": 2.0, "one": 1.0}, "stop")
    assert (last.min_policy_version, last.max_policy_version) == (0, 1)


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


@in_virtual_time
async def test_timed_out_request_is_named_and_aborted():
    engine = FakeEngine(seconds=10)
    w = worker(engine, seconds=0.05)
    with pytest.raises(WorkerError, match=r"request 1-3-\d .*train.jsonl:3.* did not finish within 0.05 s"):
        await w.rollout_group(job())
    assert set(engine.aborted) & {"1-3-0", "1-3-1"}
    assert w._pool.outstanding == [0]


def outcome(result):
    summary, trajectories = result
    return summary.trajectories, [(t.token_ids.tolist(), t.logprobs.tolist()) for t in trajectories]


@in_virtual_time
async def test_lost_engine_requests_are_retried_with_the_same_ids_and_seeds():
    seeded = job(num_samples=3, seed=(1, 2))
    expected = outcome(await worker(FakeEngine()).rollout_group(seeded))
    lost, other = FakeEngine(seconds=0.02, error=LostEngineError("SIGKILL")), FakeEngine()
    w = worker(lost, other)
    assert outcome(await w.rollout_group(seeded)) == expected
    assert lost.calls == other.calls == [["1-3-0", "1-3-1", "1-3-2"]]
    assert lost.seeds == other.seeds
    assert len(set(other.seeds)) == 3
    assert await w.retry_counts() == RetryCounts(num_retried=3, num_stale_replies=0)
    await w.rollout_group(job(group_id=4))
    assert len(lost.calls) == 1  # the lost engine gets no more requests
    assert w._pool.outstanding == [0, 0]


@in_virtual_time
async def test_stale_reply_of_a_lost_engine_is_dropped_and_counted():
    gate = asyncio.Event()
    slow, other = FakeEngine(gate=gate), FakeEngine()
    w = worker(slow, other)
    group = asyncio.create_task(w.rollout_group(job()))
    await asyncio.sleep(0.01)
    await w.mark_engine_lost(0, LostEngineError("no reply to a ping"))
    summary, _ = await group
    assert [t.response_length for t in summary.trajectories] == [1, 2]
    assert (slow.calls, other.calls) == ([["1-3-0", "1-3-1"]], [["1-3-0", "1-3-1"]])
    gate.set()
    await asyncio.sleep(0.01)
    assert await w.retry_counts() == RetryCounts(num_retried=2, num_stale_replies=2)
    await w.replace_engine(0, FakeEngine())
    assert (await w.retry_counts()).num_stale_replies == 2


@in_virtual_time
async def test_request_timeout_starts_once_an_engine_is_live():
    restarted = FakeEngine(seconds=0.05)
    w = worker(FakeEngine(error=LostEngineError("SIGKILL")), seconds=0.2)
    groups = [asyncio.create_task(w.rollout_group(job(group_id=i))) for i in (1, 2)]
    await asyncio.sleep(0.4)
    assert not any(group.done() for group in groups)
    await w.replace_engine(0, restarted)
    for group, (summary, _) in zip((1, 2), await asyncio.gather(*groups), strict=True):
        assert summary.group_id == group
    assert sorted(r for call in restarted.calls for r in call) == ["1-1-0", "1-1-1", "1-2-0", "1-2-1"]


@in_virtual_time
async def test_worker_may_start_without_engines():
    w = worker(None, seconds=5)
    group = asyncio.create_task(w.rollout_group(job()))
    await asyncio.sleep(0.01)
    await w.replace_engine(0, FakeEngine())
    await group
    assert await w.retry_counts() == RetryCounts(num_retried=0, num_stale_replies=0)


@in_virtual_time
async def test_second_turn_that_times_out_is_aborted():
    class SlowSecondTurn(FakeEngine):
        async def generate_many(self, requests):
            self.seconds = 10.0 if self.calls else 0.0
            return await super().generate_many(requests)

    engine = SlowSecondTurn()
    with pytest.raises(WorkerError, match=r"request 1-3-0 .* did not finish within 0.05 s"):
        await worker(engine, seconds=0.05, agent=two_turns).rollout_group(job(num_samples=1))
    assert engine.aborted == ["1-3-0.1"]


async def broken(episode):
    raise KeyError("answer")


class BrokenScorer:
    async def score(self, trajectories, prompt):
        raise RewardError("accuracy raised")


@pytest.mark.parametrize(
    ("engine", "options", "error", "message"),
    [
        (FakeEngine(error=WorkerError("too long")), {}, WorkerError, "too long"),
        (FakeEngine(), {"agent": broken}, AgentError, r"raised KeyError: 'answer' .* on train.jsonl:3"),
        (FakeEngine(), {"scorer": BrokenScorer()}, RewardError, "accuracy raised"),
    ],
    ids=["request", "agent", "reward"],
)
def test_errors_fail_the_group(engine, options, error, message):
    with pytest.raises(error, match=message):
        run_in_virtual_time(worker(engine, FakeEngine(), **options).rollout_group(job()))


@in_virtual_time
async def test_only_requests_of_the_same_loop_iteration_are_batched():
    wrapped = FakeEngine()
    engine = BatchingEngine(wrapped)
    requests = [GenerationRequest(request_id=f"r-{i}", token_ids=(i,), sampling=SAMPLING) for i in range(3)]
    first = await asyncio.gather(engine.generate(requests[0]), engine.generate(requests[1]))
    second = await engine.generate(requests[2])
    assert wrapped.calls == [["r-0", "r-1"], ["r-2"]]
    assert [g.token_ids[0] for g in (*first, second)] == [0, 1, 2]


@in_virtual_time
async def test_cancelled_caller_does_not_affect_the_others():
    wrapped = FakeEngine(seconds=0.05)
    engine = BatchingEngine(wrapped)
    requests = [GenerationRequest(request_id=f"r-{i}", token_ids=(i,), sampling=SAMPLING) for i in range(2)]
    cancelled, remaining = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0.01)
    cancelled.cancel()
    assert (await remaining).token_ids[0] == 1


def test_a_source_has_its_own_agent():
    turns = SourceAgent(agent=two_turns, path="games:Chess", key="data.sources.games.env.path")
    failing = SourceAgent(agent=broken, path="games:Go", key="data.sources.go.env.path")
    spec = RolloutWorkerSpec(request_timeout_seconds=5.0, source_agents={"games": turns, "go": failing})
    w = RolloutWorker(spec, [FakeEngine()], LengthScorer(), tokenizer=None)

    def of(source):
        plain = job(num_samples=1)
        return replace(plain, prompt=replace(plain.prompt, source=source))

    for source, num_requests in (("math", 1), ("games", 2)):
        _, (trajectory,) = run_in_virtual_time(w.rollout_group(of(source)))
        assert int(np.sum(np.diff(trajectory.loss_mask.astype(int)) == 1)) == num_requests
    with pytest.raises(AgentError, match=r"^data.sources.go.env.path \(games:Go\) raised KeyError"):
        run_in_virtual_time(w.rollout_group(of("go")))
