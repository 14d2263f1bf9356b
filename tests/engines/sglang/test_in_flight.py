"""Weight updates while requests are in flight: each token has the log-probability of the version that it names."""

from itertools import pairwise

import numpy as np
import pytest

from tests.engines import reference
from tests.engines.remote import requests, sync
from tests.time_limits import HANG_SECONDS

TOLERANCE = 1e-4
NOTICED = 1e-2


def prompts(num):
    return [[(11 * i + 5 * j) % 240 for j in range(6 + 3 * (i % 5))] for i in range(num)]


class Versions:
    """Weights by version, 1 to `num`, and their log-probabilities by transformers."""

    def __init__(self, model_dir, num):
        self._model_dir = model_dir
        self.weights = {version: reference.changed(model_dir, seed=100 + version) for version in range(1, num + 1)}

    def logprobs(self, prompts, generations):
        """Return by version the log-probabilities of all sampled tokens, an array for each sequence."""
        model = reference.load(self._model_dir)
        by_version = {}
        for version, weights in self.weights.items():
            model.load_state_dict(weights)
            pairs = zip(prompts, generations, strict=True)
            by_version[version] = [reference.logprobs(model, prompt, g) for prompt, g in pairs]
        return by_version


def generate_during_pushes(engine, versions, batch, max_new_tokens):
    """Return the generations of all prompts, and how often requests were continued.

    Weights are pushed whenever the longest has grown by 50 tokens or more. Where the machine lets requests end before
    they have at least 50 boundaries between versions, or one for each request, all is done again: 64 run at a time.
    """
    first, *others = versions.weights
    for _ in range(10):
        attempts = engine.call("num_attempts")
        sync(engine, versions.weights[first], first)
        sent = requests(batch, max_new_tokens=max_new_tokens)
        pending, known = [engine.submit("generate", r) for r in sent], 0
        for version in others:
            known = engine.wait_for_tokens(sent, pending, known + 50)
            sync(engine, versions.weights[version], version)
        generations = [p.result(HANG_SECONDS) for p in pending]
        num_continued = engine.call("num_attempts") - attempts - len(batch)
        if sum(len(set(g.policy_versions)) - 1 for g in generations) >= min(len(batch), 50):
            return generations, num_continued
    pytest.fail("requests end before pushes")


def check_spans(versions, batch, generations):
    """Check each token against its own version; return the numbers of boundaries, and of those noticed if moved.

    A boundary is between two tokens of different versions. Moved by one token, the last token before it counts to the
    version after it.
    """
    expected = versions.logprobs(batch, generations)
    boundaries = noticed = 0
    for i, g in enumerate(generations):
        assert np.all(np.diff(g.policy_versions) >= 0)
        own = np.array([expected[version][i][t] for t, version in enumerate(g.policy_versions)])
        assert np.abs(own - g.logprobs).max() <= TOLERANCE, f"sequence {i}: {g.policy_versions.tolist()}"
        for t, (before, after) in enumerate(pairwise(g.policy_versions)):
            if before != after:
                boundaries += 1
                noticed += bool(abs(expected[after][i][t] - g.logprobs[t]) > NOTICED)
    return boundaries, noticed


@pytest.fixture(params=["retract", "abort"])
def pause_mode(engine, request):
    engine.call("set_pause_mode", request.param)
    yield request.param
    engine.call("set_pause_mode", "retract")


def test_long_requests_lose_no_token(engine, model_dir, pause_mode):
    """16 requests, five pushes: none ends early, and all spans are those of their versions."""
    versions, batch = Versions(model_dir, 6), prompts(16)
    generations, num_continued = generate_during_pushes(engine, versions, batch, max_new_tokens=440)
    for g in generations:
        assert g.finish_reason in ("stop", "length")
        assert len(g.token_ids) == len(g.logprobs) == len(g.policy_versions)
        assert g.finish_reason == "stop" or len(g.token_ids) == 440
    boundaries, noticed = check_spans(versions, batch, generations)
    assert num_continued >= boundaries if pause_mode == "abort" else num_continued == 0
    assert noticed >= 0.9 * boundaries


@pytest.mark.slow
def test_many_requests(engine, model_dir, pause_mode):
    versions, batch = Versions(model_dir, 5), prompts(320)
    generations, _ = generate_during_pushes(engine, versions, batch, max_new_tokens=300)
    boundaries, noticed = check_spans(versions, batch, generations)
    assert noticed >= 0.9 * boundaries
