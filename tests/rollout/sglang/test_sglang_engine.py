import time

import numpy as np
import pytest

from megarl.errors import WorkerError
from tests.rollout import reference
from tests.rollout.conftest import EOS
from tests.rollout.remote import requests

PROMPTS = [[(7 * i + 3 * j) % 240 for j in range(5 + 4 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(model_dir):
    return reference.load(model_dir)


@pytest.fixture(autouse=True)
def original_weights(engine, model_dir):
    """Restore the model's original weights, which tests of other modules change."""
    health = engine.call("health")
    if health.policy_version != 0:
        from tests.rollout.remote import sync

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


def test_aborted_request_returns_the_tokens_so_far(engine):
    (request,) = requests([PROMPTS[1]], temperature=1.0, max_new_tokens=480)
    pending = engine.submit("generate", request)
    time.sleep(0.2)
    engine.call("abort", request.request_id)
    generation = pending.result(30)
    assert generation.finish_reason in ("abort", "stop")
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.policy_versions) < 480


def test_repeated_request_replaces_the_first_one(engine):
    """A worker repeats a request in place of another worker that has died."""
    (request,) = requests([PROMPTS[1]], temperature=0.0, max_new_tokens=120)
    first = engine.submit("generate", request)
    time.sleep(0.2)
    second = engine.submit("generate", request)
    with pytest.raises(WorkerError, match=f"request {request.request_id} was replaced by a newer request"):
        first.result(30)
    (alone,) = engine.generate([PROMPTS[1]], temperature=0.0, max_new_tokens=120)
    assert second.result(30).token_ids.tolist() == alone.token_ids.tolist()
    assert engine.call("health").num_requests == 0


def test_abort_all_ends_every_request(engine):
    pending = [engine.submit("generate", r) for r in requests(PROMPTS, max_new_tokens=480)]
    time.sleep(0.2)
    engine.call("abort_all")
    assert all(len(p.result(30).token_ids) < 480 for p in pending)
    assert engine.call("health").num_requests == 0


def test_request_that_exceeds_the_context_is_named(engine):
    (request,) = requests([PROMPTS[0]], max_new_tokens=600)
    with pytest.raises(WorkerError, match=rf"{request.request_id}: .*context length"):
        engine.call("generate", request)
    assert len(engine.generate([PROMPTS[0]])) == 1
