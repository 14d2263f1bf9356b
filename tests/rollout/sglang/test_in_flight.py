"""Weight updates while requests are in flight: each token has the log-probability of the version that it names."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.rollout import reference
from tests.rollout.remote import requests, sync
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
            by_version[version] = logprobs_of_batch(model, prompts, generations)
        return by_version


@torch.no_grad()
def logprobs_of_batch(model, prompts, generations):
    """Return the log-probabilities of the sampled tokens of each sequence, in one forward pass for 32 sequences."""
    found = []
    rows = [[*prompt, *g.token_ids.tolist()] for prompt, g in zip(prompts, generations, strict=True)]
    for start in range(0, len(rows), 32):
        part = rows[start : start + 32]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.long)  # causal: padding at the end is not seen
        for row, tokens in zip(ids, part, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        every = torch.log_softmax(model(ids[:, :-1]).logits.float(), -1).gather(2, ids[:, 1:, None])[..., 0]
        for row, tokens, prompt in zip(every, part, prompts[start : start + 32], strict=True):
            found.append(row[len(prompt) - 1 : len(tokens) - 1].numpy())
    return found


def generate_during_pushes(engine, versions, batch, max_new_tokens):
    """Return the generations of all prompts; weights are pushed whenever the longest has grown by 50 tokens or more.

    The engine tells its host of tokens 50 at a time. How many more it has sampled by the time of a push is left to
    chance.
    """
    first, *others = versions.weights
    assert 50 * (len(others) + 2) <= max_new_tokens, "the last push may come too late"
    sync(engine, versions.weights[first], first)
    sent = requests(batch, max_new_tokens=max_new_tokens)
    pending = [engine.submit("generate", r) for r in sent]
    known, in_flight = 0, []
    for version in others:
        known = wait_for_tokens(engine, sent, known + 50)
        in_flight.append(sum(not p.done() for p in pending))
        sync(engine, versions.weights[version], version)
    generations = [p.result(HANG_SECONDS) for p in pending]
    assert min(in_flight) > 0, f"requests in flight at each push: {in_flight}"
    return generations


def wait_for_tokens(engine, sent, num):
    """Wait until a request in flight has `num` tokens; return how many the longest has."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        parts = engine.call("partial_outputs", {r.request_id: 0 for r in sent})
        longest = max((len(part.token_ids) for part in parts.values()), default=0)
        if longest >= num:
            return longest
        assert time.monotonic() < deadline, f"no request has {num} tokens; the longest has {longest}"
        time.sleep(0.01)


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
    before = engine.call("num_attempts")
    generations = generate_during_pushes(engine, versions, batch, max_new_tokens=440)
    num_continued = engine.call("num_attempts") - before - len(batch)
    assert num_continued >= 5 if pause_mode == "abort" else num_continued == 0
    for g in generations:
        assert g.finish_reason in ("stop", "length")
        assert len(g.token_ids) == len(g.logprobs) == len(g.policy_versions)
        assert g.finish_reason == "stop" or len(g.token_ids) == 440
    boundaries, noticed = check_spans(versions, batch, generations)
    assert boundaries >= 16
    assert noticed >= 0.9 * boundaries


@pytest.mark.slow
def test_many_requests(engine, model_dir, pause_mode):
    versions, batch = Versions(model_dir, 5), prompts(320)
    generations = generate_during_pushes(engine, versions, batch, max_new_tokens=300)
    boundaries, noticed = check_spans(versions, batch, generations)
    assert {version for g in generations for version in g.policy_versions} == set(versions.weights)
    assert boundaries >= 50
    assert noticed >= 0.9 * boundaries
