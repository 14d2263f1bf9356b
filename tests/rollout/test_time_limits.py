"""Episodes over their time limit are truncated; an engine without progress fails the samples that it owes."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.batch.trajectory import ScoredGroup
from megarl.config.reward import RewardsConfig
from megarl.engines import engine_pool
from megarl.engines.engine import UNFINISHED, FinishedRequest, Generation, GenerationRequest, tokens_from
from megarl.errors import LostEngineError, RewardError, WorkerError
from megarl.rollout.agents.agent import GRACE_SECONDS
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.rollout_worker import RolloutWorker, RolloutWorkerSpec
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.reward_weights import RewardFailures
from tests.errors import expect_error
from tests.rollout.clock import in_virtual_time
from tests.rollout.whole_batches import make_generation, make_group_job
from tests.virtual_time import run_in_virtual_time

NEVER = 10**9
PROMPT_TOKENS = 3


class SlowEngine:
    """Samples one token of each running request in `token_seconds`; a token is determined by its position.

    Token n of a completion has the policy version n // 7 and the log-probability -n / 100.
    """

    def __init__(
        self,
        length: int = NEVER,
        *,
        token_seconds: float = 1.0,
        slots: int = NEVER,
        reports: bool = True,
        answers_aborts: bool = True,
        stops_after: int = NEVER,
    ) -> None:
        """`stops_after`: number of tokens, of all requests together, after which the engine samples no more."""
        self.length, self.token_seconds, self.slots = length, token_seconds, asyncio.Semaphore(slots)
        self.reports, self.answers_aborts, self.tokens_left = reports, answers_aborts, stops_after
        self.requests: list[GenerationRequest] = []
        self.parts: dict[str, Generation] = {}
        self.aborted: list[str] = []
        self.num_running = 0
        self.has_sampled = False
        self.report_times: list[float] = []

    async def stream(self, requests):
        for each in asyncio.as_completed([self._number(*pair) for pair in enumerate(requests)]):
            yield [await each]

    async def _number(self, index: int, request: GenerationRequest) -> FinishedRequest:
        try:
            return index, await self.complete(request)
        except WorkerError as error:
            return index, error

    async def complete(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        own = self.parts[request.request_id] = make_generation([], reason=UNFINISHED)
        async with self.slots:
            while own.finish_reason == UNFINISHED:
                await asyncio.sleep(self.token_seconds)
                if self.answers_aborts and request.request_id in self.aborted:
                    own = replace(own, finish_reason="abort")
                elif self.tokens_left > 0:
                    self.tokens_left -= 1
                    self.has_sampled = True
                    first, count = len(request.token_ids) - PROMPT_TOKENS, len(own.token_ids) + 1
                    numbers = np.arange(first, first + count)
                    sampled_before = first if request.request_id.endswith("-retry1") else 0
                    is_last = count == min(self.length - sampled_before, request.sampling.max_new_tokens)
                    own = make_generation(
                        100 + numbers, -numbers / 100, numbers // 7, "stop" if is_last else UNFINISHED
                    )
                self.parts[request.request_id] = own
        del self.parts[request.request_id]
        return own

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        self.report_times.append(asyncio.get_running_loop().time())
        if not self.reports:
            return {}
        has_sampled, self.has_sampled = self.has_sampled, False
        found = {}
        for request_id, num in known.items():
            part = self.parts.get(request_id)
            if part is not None and (len(part.token_ids) > num or (not len(part.token_ids) and has_sampled)):
                found[request_id] = tokens_from(part, num)
        return found

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Lengths:
    async def score(self, trajectories, prompt):
        lengths = [float(each.loss_mask.sum()) for each in trajectories]
        pairs = zip(trajectories, lengths, strict=True)
        return ScoredGroup(trajectories=[replace(each, rewards={"length": n}, reward=n) for each, n in pairs])


def worker(*engines: Any, agent: Any = single_turn, limit: float = 20.0, no_progress: float = 100.0) -> RolloutWorker:
    spec = RolloutWorkerSpec(request_timeout_seconds=limit, no_progress_seconds=no_progress, agent=agent)
    return RolloutWorker(spec, engines, Lengths(), tokenizer=None)  # type: ignore[arg-type]


def job(group_id: int = 3, **changes: Any) -> Any:
    return make_group_job(group_id=group_id, **{"num_samples": 2, "request_id": f"1-{group_id}", **changes})


async def sample(worker: RolloutWorker, *jobs: Any) -> list[Any]:
    return await asyncio.gather(*(worker.rollout_group(each) for each in jobs or [job()]))


def now() -> float:
    return asyncio.get_running_loop().time()


def require_exact(trajectory: Any) -> None:
    """Every sampled token is that of the engine at its position, once, with its log-probability and version."""
    numbers = np.flatnonzero(trajectory.loss_mask) - PROMPT_TOKENS
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == (100 + numbers).tolist()
    assert trajectory.policy_versions[trajectory.loss_mask].tolist() == (numbers // 7).tolist()
    assert np.array_equal(trajectory.logprobs[trajectory.loss_mask], (-numbers / 100).astype(np.float32))


async def two_turns(episode: Any) -> Any:
    await episode.generate(max_new_tokens=4)
    episode.observe([8])
    await episode.generate(max_new_tokens=4)
    return episode.trajectory()


@pytest.mark.parametrize("reports", [True, False], ids=["reports", "none"])
@pytest.mark.parametrize("agent", [single_turn, two_turns])
def test_waiting_in_the_queue_of_the_engine_does_not_count(agent: Any, reports: bool) -> None:
    """Each of 16 groups needs 4 s, or 8 s with two turns, and the engine samples one group at a time."""
    engine = SlowEngine(4, slots=2, reports=reports)
    groups = run_in_virtual_time(sample(worker(engine, agent=agent), *map(job, range(16))))
    assert {each.finish_reason for summary, _ in groups for each in summary.trajectories} == {"stop"}
    assert {each.response_length for summary, _ in groups for each in summary.trajectories} == {4, 8} - {
        8 if agent is single_turn else 4
    }
    assert all(not summary.terms for summary, _ in groups)


def test_a_queue_that_moves_is_progress() -> None:
    """The last group waits for 396 s, four times as long as an engine may show no progress."""
    for reports in (True, False):
        engine = SlowEngine(4, slots=2, reports=reports)
        groups = run_in_virtual_time(sample(worker(engine), *map(job, range(100))))
        assert {each.finish_reason for summary, _ in groups for each in summary.trajectories} == {"stop"}


@pytest.mark.parametrize("answers_aborts", [True, False], ids=["answered", "unanswered"])
def test_a_sample_over_its_limit_is_truncated_scored_and_trained_on(answers_aborts: bool) -> None:
    engine = SlowEngine(answers_aborts=answers_aborts)

    async def main() -> float:
        ((summary, trajectories),) = await sample(worker(engine), job(has_baseline=True))
        for each, trajectory in zip(summary.trajectories, trajectories, strict=True):
            require_exact(trajectory)
            assert each.finish_reason == trajectory.finish_reason == "seconds"
            assert 20 <= each.response_length <= 40
            assert each.rewards == {"length": each.response_length}
            assert not each.reward_errors
            assert len(each.tokens_by_version) > 2
        assert summary.kept == (0, 1)
        assert summary.baseline is not None
        return now()

    ended = run_in_virtual_time(main())
    assert sorted(engine.aborted) == ["1-3-0", "1-3-1", "1-3-2"]
    first_token_is_known = 1.5 * engine_pool.REPORT_SECONDS
    assert ended <= first_token_is_known + 20 + (1 if answers_aborts else engine_pool.ABORT_GRACE_SECONDS + 1)


@in_virtual_time
async def test_the_limit_does_not_run_while_engines_are_paused() -> None:
    engine = SlowEngine(token_seconds=0.5, answers_aborts=True)
    w = worker(engine)
    group = asyncio.create_task(w.rollout_group(job(max_new_tokens=10**5)))
    await asyncio.sleep(15)
    await w.pause_clock()
    await asyncio.sleep(1000)
    assert not group.done()
    assert not engine.aborted
    await w.resume_clock()
    await group
    assert 1020 < now() < 1040


def ended_by_limit(agent: Any, engine: SlowEngine | None = None, **changes: Any) -> tuple[Any, Any]:
    """Return summary and trajectories of one episode."""
    engine = engine or SlowEngine(4, token_seconds=0.5)
    ((summary, trajectories),) = run_in_virtual_time(sample(worker(engine, agent=agent), job(num_samples=1, **changes)))
    return summary, trajectories


def test_later_completions_of_an_agent_are_empty() -> None:
    turns: list[Generation] = []

    async def agent(episode: Any) -> Any:
        while len(turns) < 20:
            turns.append(await episode.generate())
            turns.append(await episode.complete([5, 6], max_new_tokens=3))
        return episode.trajectory()

    summary, (trajectory,) = ended_by_limit(agent)
    assert trajectory.finish_reason == "seconds"
    is_over = [turn.finish_reason == "seconds" for turn in turns]
    assert is_over == sorted(is_over)
    assert 10 <= sum(not each for each in is_over) < 20
    assert all(not len(turn.token_ids) for turn in turns[sum(not each for each in is_over) + 1 :])
    assert summary.kept == (0,)
    assert summary.trajectories[0].response_length == sum(len(turn.token_ids) for turn in turns[::2])


async def asks_for_ever(episode: Any) -> None:
    while True:
        await episode.generate(max_new_tokens=4)


async def hangs(episode: Any) -> None:
    await episode.generate()
    await asyncio.sleep(NEVER)


async def ignores_its_cancellation(episode: Any) -> None:
    await episode.generate()
    try:
        await asyncio.sleep(NEVER)
    except asyncio.CancelledError:
        await asyncio.sleep(NEVER)


async def fails_after_the_limit(episode: Any) -> Any:
    while True:
        generation = await episode.generate(max_new_tokens=4)
        assert generation.token_ids[-1] >= 100, "an empty completion has no last token"


async def forks_and_hangs(episode: Any) -> None:
    await episode.generate(max_new_tokens=4)
    episode.fork([5, 6, 9])
    await hangs(episode)


async def swallows_the_end(episode: Any) -> Any:
    while (await episode.complete([5, 6], max_new_tokens=4)).finish_reason != "seconds":
        await episode.generate(max_new_tokens=1)
    episode.finish_reason = "stop"
    return episode.trajectory()


AGENTS = [
    asks_for_ever,
    hangs,
    ignores_its_cancellation,
    fails_after_the_limit,
    forks_and_hangs,
    swallows_the_end,
]


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_that_does_not_end_is_stopped_and_its_tokens_are_the_sample(agent: Any) -> None:
    summary, trajectories = ended_by_limit(agent)
    assert {trajectory.finish_reason for trajectory in trajectories} == {"seconds"}
    assert len(trajectories) == 1 + (agent is forks_and_hangs)
    assert summary.kept == (0,)
    assert summary.trajectories[0].response_length >= 4
    assert trajectories[-1].rewards["length"] == summary.trajectories[0].response_length


def test_an_agent_that_asks_for_nothing_fails_alone() -> None:
    async def agent(episode: Any) -> None:
        await asyncio.sleep(NEVER)

    summary, _ = ended_by_limit(agent)
    assert "sampled nothing" in summary.trajectories[0].reward_errors["environment"]
    assert summary.terms["environment"].num_retried == 1


def test_an_agent_may_work_for_longer_than_the_limit_before_its_first_request() -> None:
    async def agent(episode: Any) -> Any:
        await asyncio.sleep(60)
        await episode.generate()
        return episode.trajectory()

    summary, _ = ended_by_limit(agent)
    assert summary.trajectories[0].finish_reason == "stop"


def test_an_agent_that_ends_soon_after_the_limit_without_a_further_request_is_complete() -> None:
    async def agent(episode: Any) -> Any:
        await episode.generate()
        await asyncio.sleep(20 + GRACE_SECONDS / 2)
        return episode.trajectory()

    summary, _ = ended_by_limit(agent)
    assert summary.trajectories[0].finish_reason == "stop"


def failures(*summaries: Any, **config: Any) -> RewardFailures:
    found = RewardFailures(RewardsConfig.model_validate({"terms": {"length": {}}, **config}), 8, lambda _: None)
    found.add([FinishedGroup(summary, None) for summary in summaries])  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("stops_after", [0, 60], ids=["never a token", "in the middle"])
def test_samples_of_an_engine_without_progress_are_continued_on_another(stops_after: int) -> None:
    stuck, other = SlowEngine(50, stops_after=stops_after), SlowEngine(50)

    async def main() -> Any:
        w = worker(stuck, other, limit=1e6)
        ((summary, trajectories),) = await sample(w)
        assert 100 <= now() <= 250
        later = await sample(w, *map(job, range(10, 14)))  # the stuck engine is avoided
        return summary, trajectories, later

    summary, trajectories, later = run_in_virtual_time(main())
    for trajectory in trajectories:
        require_exact(trajectory)
    assert [each.response_length for each in summary.trajectories] == [50, 50]
    assert sorted(stuck.aborted) == ["1-3-0", "1-3-1"]
    assert len(stuck.requests) == 2
    asked = other.requests[:2]
    seeds = {f"{request.request_id}-retry1": request.sampling.seed for request in stuck.requests}
    assert {request.request_id: request.sampling.seed for request in asked} == seeds
    assert all(len(request.token_ids) > 20 for request in asked) == bool(stops_after)
    assert summary.terms["engine"].num_retried == 2
    assert failures(summary).metrics() == {"reward/engine/retried": 2, "reward/engine/failed": 0}
    assert all(not later_summary.terms for later_summary, _ in later)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_samples_are_left_out_and_counted_if_a_second_engine_makes_no_progress(num_engines: int) -> None:
    engines = [SlowEngine(stops_after=0) for _ in range(num_engines)]
    ((summary, _),) = run_in_virtual_time(sample(worker(*engines)))
    message = f"engine {num_engines - 1} has shown no progress for 100 s (rollout.no_progress_seconds) on train.jsonl:3"
    assert [each.reward_errors for each in summary.trajectories] == [{"engine": message}] * 2
    assert summary.kept == ()
    assert sum(len(engine.requests) for engine in engines) == 4
    found = failures(summary, max_failed_share=0.5)
    assert found.metrics() == {"reward/engine/retried": 2, "reward/engine/failed": 2}
    found.check(1)
    with expect_error(RewardError, "2", "8", "rollout.no_progress_seconds"):
        failures(summary, max_failed_share=0.2).check(1)


def test_an_engine_that_recovers_serves_the_second_request() -> None:
    engine = SlowEngine(4, stops_after=0)

    async def main() -> Any:
        asyncio.get_running_loop().call_later(150, setattr, engine, "tokens_left", NEVER)
        return await sample(worker(engine))

    ((summary, _),) = run_in_virtual_time(main())
    assert [each.finish_reason for each in summary.trajectories] == ["stop", "stop"]


@in_virtual_time
async def test_pauses_do_not_count_as_time_without_progress() -> None:
    engine = SlowEngine(stops_after=0)
    w = worker(engine)
    group = asyncio.create_task(w.rollout_group(job(num_samples=1)))
    for _ in range(3):
        await asyncio.sleep(60)
        await w.pause_clock()
        await asyncio.sleep(500)
        await w.resume_clock()
    assert [len(engine.requests), group.done()] == [2, False]
    await group
    assert now() == pytest.approx(200 + 3 * 500, abs=1)


@in_virtual_time
async def test_a_process_that_was_blocked_looks_again_before_it_blames_the_engine() -> None:
    engine = SlowEngine(4, token_seconds=40)
    w = worker(engine)
    group = asyncio.create_task(w.rollout_group(job(num_samples=1)))
    await asyncio.sleep(1)
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + 500  # type: ignore[method-assign]
    summary, _ = await group
    assert not summary.terms


@in_virtual_time
async def test_an_agent_cannot_hide_that_its_engine_failed() -> None:
    async def agent(episode: Any) -> Any:
        try:
            await episode.generate()
        except WorkerError as error:
            raise ValueError("no completion") from error

    ((summary, _),) = await sample(worker(SlowEngine(stops_after=0), agent=agent))
    assert [list(each.reward_errors) for each in summary.trajectories] == [["engine"]] * 2


class RefusingEngine(SlowEngine):
    """Refuses requests of one sample, as SGLang does with those that it cannot take."""

    refused = "1-3-1"

    async def complete(self, request: GenerationRequest) -> Generation:
        if request.request_id.startswith(self.refused):
            self.requests.append(request)
            raise WorkerError(f"request {request.request_id}: the input is too long")
        return await super().complete(request)


@pytest.mark.parametrize("agent", [single_turn, two_turns])
def test_a_request_that_the_engine_refuses_fails_its_sample_alone(agent: Any) -> None:
    engine = RefusingEngine(4)
    ((summary, _),) = run_in_virtual_time(sample(worker(engine, agent=agent)))
    assert summary.kept == (0,)
    error = summary.trajectories[1].reward_errors["engine"]
    assert error == "request 1-3-1-retry1: the input is too long on train.jsonl:3"
    assert failures(summary).metrics() == {"reward/engine/retried": 1, "reward/engine/failed": 1}


@in_virtual_time
async def test_an_engine_that_is_lost_within_the_grace_leaves_the_tokens_known() -> None:
    engine = SlowEngine(answers_aborts=False)
    w = worker(engine)
    group = asyncio.create_task(w.rollout_group(job()))
    while not engine.aborted:
        await asyncio.sleep(1)
    await w.update_engines({0: LostEngineError("SIGKILL")})
    _, trajectories = await group
    assert {trajectory.finish_reason for trajectory in trajectories} == {"seconds"}
    for trajectory in trajectories:
        require_exact(trajectory)


def test_the_time_in_the_queue_of_another_engine_does_not_count_after_a_loss() -> None:
    """The second engine samples another group for 60 s first."""
    lost, busy = SlowEngine(30), SlowEngine(30, slots=2)

    async def main() -> Any:
        w = worker(lost, busy, limit=35.0)
        groups = [asyncio.create_task(w.rollout_group(job(number))) for number in range(4)]
        await asyncio.sleep(12)
        await w.update_engines({0: LostEngineError("SIGKILL")})
        return await asyncio.gather(*groups)

    for summary, _ in run_in_virtual_time(main()):
        assert {each.finish_reason for each in summary.trajectories} == {"stop"}


def test_workers_ask_an_engine_at_different_times_in_one_call_each() -> None:
    engines = [SlowEngine(100) for _ in range(4)]

    async def main() -> None:
        await asyncio.gather(*(sample(worker(engine, limit=1e6), *map(job, range(3))) for engine in engines))

    run_in_virtual_time(main())
    times = [time for engine in engines for time in engine.report_times]
    assert len(set(times)) == len(times)
    for engine in engines:
        gaps = np.diff([0.0, *engine.report_times])
        assert engine_pool.REPORT_SECONDS <= gaps.min() <= gaps.max() <= engine_pool.REPORT_SECONDS * 1.5
