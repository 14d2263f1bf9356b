"""A real engine: its samples, requests that are aborted, held or continued elsewhere, and its memory."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.engines import engine_pool
from megarl.engines.engine import continue_after, tokens_from
from megarl.errors import WeightSyncError, WorkerError
from megarl.rollout.rollout_worker import RolloutWorker, RolloutWorkerSpec
from tests.engines import reference
from tests.engines.conftest import EOS
from tests.engines.remote import begin_requests, let_work, requests, started, sync
from tests.engines.sglang.test_in_flight import TOLERANCE, pause_mode, prompts
from tests.errors import expect_error
from tests.model_files.hostile_code import mark_of
from tests.rollout.whole_batches import NoScores, WholeBatches, make_group_job
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_for, wait_until

__all__ = ["pause_mode"]

PROMPTS = [[(7 * i + 3 * j) % 240 for j in range(5 + 4 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(model_dir):
    return reference.load(model_dir)


@pytest.fixture(autouse=True)
def original_weights(engine, model_dir):
    """Restore the model's original weights, which tests of other modules change."""
    if engine.call("health").policy_version != 0:
        sync(engine, reference.load(model_dir).state_dict(), 0)


def test_code_in_the_model_folder_has_not_run(engine, model_dir):
    assert engine.generate(PROMPTS[:1], temperature=1.0, max_new_tokens=1)
    assert (Path(model_dir) / "hostile.py").exists()
    assert not mark_of(Path(model_dir)).exists()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_temperature_scaled_distribution(engine, model, temperature):
    generations = engine.generate(PROMPTS, temperature=temperature, max_new_tokens=24)
    assert reference.worst_difference(model, PROMPTS, generations, temperature) <= 1e-4


def test_logprobs_are_not_renormalized_for_top_p_and_top_k(engine, model):
    generations = engine.generate(PROMPTS, temperature=1.0, top_p=0.5, top_k=8)
    assert reference.worst_difference(model, PROMPTS, generations) <= 1e-4


def test_greedy_decoding_matches_transformers(engine, model):
    generations = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=24)
    assert [g.token_ids.tolist() for g in generations] == [reference.greedy(model, p, 24, EOS) for p in PROMPTS]
    assert reference.worst_difference(model, PROMPTS, generations) <= 1e-4


def test_completion_ends_with_a_stop_token_or_at_max_new_tokens(engine):
    generations = engine.generate(PROMPTS * 8, max_new_tokens=200)
    assert {g.finish_reason for g in generations} == {"stop", "length"}
    for g in generations:
        ended = g.token_ids[-1] == EOS
        assert ended == (g.finish_reason == "stop")
        assert EOS not in g.token_ids[:-1]
        assert ended or len(g.token_ids) == 200


def test_samples_of_one_prompt_differ_and_have_the_policy_version(engine):
    generations = engine.generate([PROMPTS[3]] * 8)
    assert len({tuple(g.token_ids) for g in generations}) > 1
    for g in generations:
        assert g.token_ids.dtype == g.policy_versions.dtype == np.int32
        assert g.logprobs.dtype == np.float32
        assert g.policy_versions.tolist() == [0] * len(g.token_ids)


def test_requests_wait_for_the_kv_cache_and_are_not_changed_by_that(engine):
    """Those of a higher priority go first."""
    batch = requests(PROMPTS * 16, seeds=range(96), max_new_tokens=470)
    first, urgent = batch[:90], [replace(request, priority=1) for request in batch[90:]]
    pending = [engine.submit("generate_many", first)]
    reports = []
    assert wait_until(lambda: reports.append(engine.call("health")) or reports[-1].num_waiting)
    assert reports[-1].num_waiting + reports[-1].concurrency_limit <= reports[-1].num_requests
    pending.append(engine.submit("generate_many", urgent))
    after = pending[1].result(HANG_SECONDS)
    assert not pending[0].done()
    together = [*pending[0].result(HANG_SECONDS), *after]
    assert engine.call("health").num_waiting == 0
    for sent, generation in list(zip(batch, together, strict=True))[::12]:
        (alone,) = engine.call("generate_many", [replace(sent, request_id=f"{sent.request_id} alone")])
        assert alone.token_ids.tolist() == generation.token_ids.tolist()
        assert np.abs(alone.logprobs - generation.logprobs).max() <= TOLERANCE


@pytest.mark.parametrize("method", ["abort", "abort_all"])
def test_aborted_requests_return_the_tokens_so_far(engine, method):
    """Requests may end by themselves before they are aborted: they are repeated until one has not."""
    for _ in range(100):
        sent, pending = begin_requests(engine, PROMPTS[:1] if method == "abort" else PROMPTS, max_new_tokens=480)
        engine.call(method, *([sent[0].request_id] if method == "abort" else []))
        generations = [p.result(HANG_SECONDS) for p in pending]
        aborted = [g for g in generations if g.finish_reason == "abort"]
        if aborted:
            break
    assert aborted
    assert {g.finish_reason for g in generations} <= {"abort", "stop", "length"}
    for g in aborted:
        assert 0 < len(g.token_ids) == len(g.logprobs) == len(g.policy_versions) < 480
    assert engine.call("health").num_requests == 0


def test_repeated_request_replaces_the_first_one(engine):
    """A worker repeats a request in place of another worker that has died."""
    (request,) = requests([PROMPTS[1]], temperature=0.0, max_new_tokens=100)
    (scheduler,) = engine.scheduler_processes()
    scheduler.suspend()
    first, second = [engine.submit("generate", request) for _ in range(2)]
    scheduler.resume()
    with pytest.raises(WorkerError, match=f"request {request.request_id} was replaced by a newer request"):
        first.result(HANG_SECONDS)
    (alone,) = engine.generate([PROMPTS[1]], temperature=0.0, max_new_tokens=100)
    assert second.result(HANG_SECONDS).token_ids.tolist() == alone.token_ids.tolist()
    assert engine.call("health").num_requests == 0


def test_request_that_exceeds_the_context_is_named(engine):
    (request,) = requests([PROMPTS[0]], max_new_tokens=600)
    with pytest.raises(WorkerError, match=rf"{request.request_id}: .*context length"):
        engine.call("generate", request)
    assert len(engine.generate([PROMPTS[0]])) == 1


def test_released_engine_needs_its_memory_and_an_update_before_it_generates(engine, model):
    short = requests([PROMPTS[1]], temperature=0.0)
    _, (running,) = begin_requests(engine, [PROMPTS[0]], max_new_tokens=480)
    engine.call("release", ("kv_cache",))  # waits for requests in flight
    assert running.result(HANG_SECONDS).finish_reason in ("stop", "length")
    with expect_error(WorkerError, "KV", "released", "generate"):
        engine.call("generate", *short)
    engine.call("resume", ("weights", "kv_cache"))
    before = engine.call("generate", *short)

    engine.call("release", ("weights", "kv_cache"))
    engine.call("release", ("weights",))  # is released
    with expect_error(WorkerError, "KV", "released", "weights"):
        engine.call("generate", *short)
    engine.call("resume", ("weights",))
    engine.call("randomize_weights")  # the memory of the weights has any contents now
    engine.call("resume", ("kv_cache",))
    with expect_error(WeightSyncError, "released", "weights"):
        engine.call("generate", *short)
    sync(engine, model.state_dict(), 0)
    after = engine.call("generate", *requests([PROMPTS[1]], temperature=0.0))
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()


@pytest.mark.usefixtures("pause_mode")
def test_held_requests_continue_with_the_new_weights_once_the_memory_is_back(engine, model):
    (late,) = requests([PROMPTS[1]], temperature=0.0)
    engine.call("set_holds_requests", True)
    try:
        _, (running,) = begin_requests(engine, [PROMPTS[0]], temperature=0.0, max_new_tokens=480)
        engine.call("release", ("kv_cache",))
        engine.call("release", ("weights",))
        waiting = engine.submit("generate", late)
        engine.call("resume", ("weights",))
        engine.call("randomize_weights")
        sync(engine, model.state_dict(), 5)
        let_work(engine)
        assert not running.done()
        assert not waiting.done()
        engine.call("resume", ("weights", "kv_cache"))
        versions = running.result(HANG_SECONDS).policy_versions.tolist()
        assert versions == sorted(versions)
        assert versions[-1] == 5
        assert set(waiting.result(HANG_SECONDS).policy_versions.tolist()) == {5}
    finally:
        engine.call("set_holds_requests", False)
    sync(engine, model.state_dict(), 0)
    assert engine.call("generate", *requests([PROMPTS[1]], temperature=0.0)).policy_versions.tolist()[-1] == 0


@pytest.mark.parametrize("pause_mode", ["abort"], indirect=True)
def test_request_aborted_by_its_caller_is_not_continued(engine, model, pause_mode):
    (long,), (running,) = begin_requests(engine, [PROMPTS[0]], temperature=0.0, max_new_tokens=400)
    engine.call("begin_weights")
    engine.call("abort", long.request_id)
    let_work(engine)
    assert not running.done()
    sync(engine, model.state_dict(), 0)  # begins another update
    generation = running.result(HANG_SECONDS)
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) < 400


@pytest.mark.usefixtures("pause_mode")
def test_request_that_comes_and_is_aborted_during_a_pause_is_not_sent(engine, model):
    engine.call("begin_weights")
    before = engine.call("num_attempts")
    (request,) = requests([PROMPTS[0]], max_new_tokens=400)
    waiting = engine.submit("generate", request)
    assert wait_until(lambda: engine.call("health").num_requests)
    engine.call("abort", request.request_id)
    sync(engine, model.state_dict(), 0)  # begins another update
    assert waiting.result(HANG_SECONDS).finish_reason == "abort"
    assert engine.call("num_attempts") == before
    assert engine.generate([PROMPTS[1]])[0].finish_reason in ("stop", "length")


def test_requests_continued_after_any_number_of_tokens_equal_uninterrupted_ones(engine):
    """Prefill and decode round differently: log-probabilities are not bitwise equal, the sampled tokens are."""
    batch = requests(prompts(4), seeds=range(1000, 1004), max_new_tokens=96)
    whole = engine.call("generate_many", batch)
    stops = [(i, n) for i, g in enumerate(whole) for n in range(1, 65) if n < min(len(g.token_ids), 96)]
    rests = [continue_after(batch[i], replace(whole[i], token_ids=whole[i].token_ids[:n])) for i, n in stops]
    rests = [replace(rest, request_id=f"{i} after {n}") for rest, (i, n) in zip(rests, stops, strict=True)]
    continued = engine.call("generate_many", rests)
    num_tokens = num_equal = 0
    for (i, n), rest in zip(stops, continued, strict=True):
        expected = tokens_from(whole[i], n)
        num = min(len(rest.token_ids), len(expected.token_ids))
        is_equal = rest.token_ids[:num] == expected.token_ids[:num]
        num_tokens += len(expected.token_ids)
        num_equal += np.count_nonzero(is_equal)
        same = np.logical_and.accumulate(is_equal)  # after another token, the rest is another completion
        assert np.abs(rest.logprobs[:num] - expected.logprobs[:num])[same].max(initial=0) <= TOLERANCE
    assert len(stops) >= 100
    assert num_equal >= 0.999 * num_tokens


def next_report(engine, batch, pending, last):
    """Return the partial outputs once they have a token more than the last ones for each request in flight."""
    while not all(p.done() for p in pending):
        report = engine.partial_outputs(batch)
        before = num_tokens({request_id: last[request_id] for request_id in report.keys() & last.keys()})
        if report and num_tokens(report) >= before + len(report):
            return report
        time.sleep(0.02)
    return {}


def num_tokens(report):
    return sum(len(part.token_ids) for part in report.values())


def test_partial_outputs_are_beginnings_of_the_completions(engine, model_dir):
    """With pushes in flight: tokens, log-probabilities and versions, bit for bit."""
    batch = requests(prompts(12), seeds=range(1000, 1012), max_new_tokens=440)
    pending = [engine.submit("generate", request) for request in batch]
    reports: list[dict] = [{}]
    for version in (1, 2, 3):
        for _ in range(2):
            reports.append(next_report(engine, batch, pending, reports[-1]))
        sync(engine, reference.changed(model_dir, seed=100 + version), version)
    whole = {request.request_id: p.result(HANG_SECONDS) for request, p in zip(batch, pending, strict=True)}
    assert engine.partial_outputs(batch) == {}
    found = [(whole[request_id], part) for report in reports for request_id, part in report.items()]
    checked = [(generation, part) for generation, part in found if len(part.token_ids)]  # others had only waited
    assert len(checked) >= 12
    assert sum(len(set(part.policy_versions.tolist())) > 1 for _, part in checked) >= 1
    for generation, part in checked:
        num = len(part.token_ids)
        assert 0 < num < len(generation.token_ids)
        for name in ("token_ids", "logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(part, name), getattr(generation, name)[:num])
        assert part.finish_reason == "unfinished"


class AsyncEngine(WholeBatches):
    """A `GenerationEngine` of this process's event loop."""

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, request):
        return await asyncio.wrap_future(self.engine.submit("generate", request))

    async def partial_outputs(self, known):
        return await asyncio.wrap_future(self.engine.submit("partial_outputs", known))

    async def abort(self, request_id):
        await asyncio.wrap_future(self.engine.submit("abort", request_id))


def test_truncated_samples_have_the_tokens_of_the_engine(engine, monkeypatch):
    """Their time is over as soon as the engine reports their first tokens."""
    monkeypatch.setattr(engine_pool, "REPORT_SECONDS", 0.05)
    job = make_group_job(num_samples=4, max_new_tokens=480)

    async def rollout(seconds):
        limits = RolloutWorkerSpec(request_timeout_seconds=seconds, no_progress_seconds=UNREACHED_SECONDS)
        worker = RolloutWorker(limits, [AsyncEngine(engine)], NoScores(), tokenizer=None)
        _, trajectories = await worker.rollout_group(job)
        return trajectories

    expected, trajectories = asyncio.run(rollout(UNREACHED_SECONDS)), asyncio.run(rollout(1e-3))
    truncated = [trajectory for trajectory in trajectories if trajectory.finish_reason == "seconds"]
    assert truncated
    for one, other in zip(trajectories, expected, strict=True):
        num = one.num_tokens
        assert num < other.num_tokens if one.finish_reason == "seconds" else num == other.num_tokens
        assert one.loss_mask.sum() >= 1
        assert one.token_ids.tolist() == other.token_ids[:num].tolist()
        assert np.abs(one.logprobs - other.logprobs[:num]).max() <= TOLERANCE
        assert np.array_equal(one.policy_versions, other.policy_versions[:num])


def test_group_continues_after_its_engine_is_killed(engine, spec, monkeypatch):
    monkeypatch.setattr(engine_pool, "REPORT_SECONDS", 0.05)
    job = make_group_job(num_samples=8, max_new_tokens=480)

    async def rollout(*engines, kill=None):
        limits = RolloutWorkerSpec(request_timeout_seconds=UNREACHED_SECONDS)
        worker = RolloutWorker(limits, engines, NoScores(), tokenizer=None)
        group = asyncio.create_task(worker.rollout_group(job))
        if kill is not None:
            pending = worker.pool.live(0)._pending
            await wait_for(lambda: sum(len(each.reported.token_ids) for each in pending.values()) >= 50)
            kill()
        return await group

    _, expected = asyncio.run(rollout(AsyncEngine(engine)))
    with started(spec) as lost:
        kill = lost.scheduler_processes()[0].kill
        summary, trajectories = asyncio.run(rollout(AsyncEngine(lost), AsyncEngine(engine), kill=kill))
    assert summary.num_retried >= 1
    assert summary.num_kept_tokens >= 50
    for one, other in zip(trajectories, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() <= TOLERANCE
        assert one.finish_reason == other.finish_reason


def test_paused_scheduler_sleeps_and_wakes_up_for_commands(engine):
    (request,) = requests([[1, 2, 3]], temperature=0.0, max_new_tokens=4)
    (scheduler,) = engine.scheduler_processes()
    engine.call("begin_weights")
    waiting = engine.submit("generate", request)
    states = []
    for _ in range(100):
        time.sleep(0.005)
        states.append(scheduler.status())
    assert states.count(psutil.STATUS_SLEEPING) > 50  # one that polls is never seen asleep, also on a busy machine
    assert not waiting.done()
    with expect_error(WeightSyncError, "tensors", "arrive"):
        engine.call("end_weights", 1)  # ends the pause; the weights stay as they are
    assert 1 <= len(waiting.result(HANG_SECONDS).token_ids) <= 4
