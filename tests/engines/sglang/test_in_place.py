"""Pushes that keep the KV cache: each token is of the weights that it names, on keys and values of older ones."""

from itertools import groupby, pairwise

import numpy as np
import pytest
import torch

from megarl.batch.trajectory import find_mixed_kv
from tests.engines import reference
from tests.engines.remote import requests, started, sync
from tests.engines.sglang.test_in_flight import NOTICED, TOLERANCE, Versions, generate_during_pushes, prompts
from tests.time_limits import HANG_SECONDS


@pytest.fixture(scope="module")
def in_place_engine(spec):
    with started(spec, pause_mode="in_place") as engine:
        yield engine


@torch.no_grad()
def logprobs_on_mixed_kv(model_dir, weights, prompt, token_ids, versions):
    """Return the log-probabilities of sampled tokens, [K], where the weights change and the KV cache stays.

    Args:
        versions: [K], of the weights that compute each token's log-probability from the token before it.
    """
    model = reference.load(model_dir)
    inputs = [*prompt, *token_ids[:-1]]
    version_of_input = [versions[0]] * (len(prompt) - 1) + list(versions)
    cache, logits, position = None, [], 0
    for version, same in groupby(version_of_input):
        num = len(list(same))
        model.load_state_dict(weights[version])
        output = model(torch.tensor([inputs[position : position + num]]), past_key_values=cache, use_cache=True)
        cache, position = output.past_key_values, position + num
        logits.append(output.logits[0].float())
    every = torch.log_softmax(torch.cat(logits)[len(prompt) - 1 :], -1)
    return every[torch.arange(len(token_ids)), torch.tensor(token_ids)].numpy()


def test_tokens_are_of_their_versions_on_the_kv_cache_of_older_ones(in_place_engine, model_dir, record_property):
    versions, batch = Versions(model_dir, 4), prompts(16)
    generations, _ = generate_during_pushes(in_place_engine, versions, batch, max_new_tokens=300)
    alone = versions.logprobs(batch, generations)
    boundaries = noticed = 0
    drifts = []
    for i, (prompt, g) in enumerate(zip(batch, generations, strict=True)):
        tokens, labels = g.token_ids.tolist(), g.policy_versions.tolist()
        expected = logprobs_on_mixed_kv(model_dir, versions.weights, prompt, tokens, labels)
        assert np.abs(expected - g.logprobs).max() <= TOLERANCE
        for t, (before, after) in enumerate(pairwise(labels)):
            if before != after:  # moved by one token, the last token before it counts to the version after it
                moved = [*labels[:t], after, *labels[t + 1 :]]
                wrong = logprobs_on_mixed_kv(model_dir, versions.weights, prompt, tokens[: t + 1], moved[: t + 1])
                boundaries += 1
                noticed += bool(abs(wrong[t] - g.logprobs[t]) > NOTICED)
        mixed = find_mixed_kv(np.ones(len(tokens), np.bool_), g.policy_versions)
        own = np.array([alone[version][i][t] for t, version in enumerate(labels)])
        drift = np.abs(own - g.logprobs)
        assert drift[~mixed].max(initial=0) <= TOLERANCE
        drifts += drift[mixed].tolist()
    record_property("mixed_kv_drift", f"{len(drifts)} tokens, mean {np.mean(drifts):.3g}, max {np.max(drifts):.3g}")
    assert boundaries >= 8
    assert noticed >= 0.9 * boundaries
    assert np.mean(drifts) > NOTICED


def test_new_requests_reuse_nothing_of_older_weights(in_place_engine, model_dir):
    """The same prompts before and after a push that a running request keeps from flushing."""
    batch = prompts(8)
    (long,) = requests([[7] * 9], max_new_tokens=440)
    running = in_place_engine.submit("generate", long)
    weights = {version: reference.changed(model_dir, seed=200 + version) for version in (11, 12)}
    for version in weights:
        sync(in_place_engine, weights[version], version)
        generations = in_place_engine.generate(batch, max_new_tokens=4)
        model = reference.load(model_dir, weights[version])
        assert reference.worst_difference(model, batch, generations) <= TOLERANCE
        assert {v for g in generations for v in g.policy_versions.tolist()} == {version}
    running.result(HANG_SECONDS)


def test_pushes_of_the_same_weights_change_versions_only(in_place_engine, model_dir):
    weights = reference.changed(model_dir, seed=300)
    sync(in_place_engine, weights, 20)
    batch = requests(prompts(8), seeds=range(8), max_new_tokens=400)
    expected = in_place_engine.call("generate_many", batch)
    pending = [in_place_engine.submit("generate", request) for request in batch]
    in_place_engine.wait_for_tokens(batch, pending, 50)
    for version in (21, 22, 23):
        sync(in_place_engine, weights, version)
    generations = [p.result(HANG_SECONDS) for p in pending]
    for one, other in zip(generations, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        assert np.all(np.diff(one.policy_versions) >= 0)
    assert len({v for g in generations for v in g.policy_versions.tolist()}) >= 2
