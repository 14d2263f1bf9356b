import time

import numpy as np
import pytest

from megarl.errors import WeightSyncError, WorkerError
from tests.rollout import reference
from tests.rollout.conftest import EOS
from tests.rollout.remote import begin_requests, let_work, requests, sync
from tests.rollout.sglang.test_in_flight import pause_mode
from tests.time_limits import HANG_SECONDS

__all__ = ["pause_mode"]

PROMPTS = [[(7 * i + 3 * j) % 240 for j in range(5 + 4 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(model_dir):
    return reference.load(model_dir)


def wait_running(engine):
    """Wait until the engine has a request."""
    deadline = time.monotonic() + HANG_SECONDS
    while engine.call("health").num_requests == 0:
        assert time.monotonic() < deadline, "the engine has no request"


@pytest.fixture(autouse=True)
def original_weights(engine, model_dir):
    """Restore the model's original weights, which tests of other modules change."""
    health = engine.call("health")
    if health.policy_version != 0:
        sync(engine, reference.load(model_dir).state_dict(), 0)


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
    reasons = {g.finish_reason for g in generations}
    assert reasons == {"stop", "length"}
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
    with pytest.raises(WorkerError, match="the engine has released its KV cache; it cannot generate before resume"):
        engine.call("generate", *short)
    engine.call("resume", ("weights", "kv_cache"))
    before = engine.call("generate", *short)

    engine.call("release", ("weights", "kv_cache"))
    engine.call("release", ("weights",))  # is released
    with pytest.raises(WorkerError, match="released its KV cache and weights"):
        engine.call("generate", *short)
    engine.call("resume", ("weights",))
    engine.call("randomize_weights")  # the memory of the weights has any contents now
    engine.call("resume", ("kv_cache",))
    with pytest.raises(WeightSyncError, match="the engine has released its weights; it needs an update"):
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


def test_request_aborted_by_its_caller_is_not_continued(engine, model):
    engine.call("set_pause_mode", "abort")
    try:
        (long,), (running,) = begin_requests(engine, [PROMPTS[0]], temperature=0.0, max_new_tokens=400)
        engine.call("begin_weights")
        engine.call("abort", long.request_id)
        let_work(engine)
        assert not running.done()
        sync(engine, model.state_dict(), 0)  # begins another update
        generation = running.result(HANG_SECONDS)
        assert generation.finish_reason == "abort"
        assert 0 < len(generation.token_ids) < 400
    finally:
        engine.call("set_pause_mode", "retract")


@pytest.mark.usefixtures("pause_mode")
def test_request_that_comes_and_is_aborted_during_a_pause_is_not_sent(engine, model):
    engine.call("begin_weights")
    before = engine.call("num_attempts")
    (request,) = requests([PROMPTS[0]], max_new_tokens=400)
    waiting = engine.submit("generate", request)
    wait_running(engine)
    engine.call("abort", request.request_id)
    sync(engine, model.state_dict(), 0)  # begins another update
    assert waiting.result(HANG_SECONDS).finish_reason == "abort"
    assert engine.call("num_attempts") == before
    assert engine.generate([PROMPTS[1]])[0].finish_reason in ("stop", "length")
