"""A completion depends only on prompt, seed and weights, not on the batch; `test_agreement.py` has other families."""

import numpy as np
import torch

from megarl.rollout.engine import GenerationRequest, Sampling
from megarl.rollout.sglang.cpu_determinism import seeded_hash

PROMPTS = [tuple((11 * i + 3 * j) % 240 for j in range(4 + 5 * i)) for i in range(7)]


def request(prompt, seed, label):
    sampling = Sampling(temperature=1.0, max_new_tokens=20, seed=seed)
    return GenerationRequest(request_id=f"{label}-{seed}-{hash(prompt)}", token_ids=prompt, sampling=sampling)


def test_completion_does_not_depend_on_the_batch(engine):
    assert_batch_independent(engine)


def assert_batch_independent(engine):
    alone = [engine.call("generate", request(p, seed=i, label="alone")) for i, p in enumerate(PROMPTS)]
    others = [request(p, seed=100 + i, label="others") for p in PROMPTS for i in range(6)]
    together = engine.call(
        "generate_many",
        others[:17] + [request(p, seed=i, label="together") for i, p in enumerate(PROMPTS)] + others[17:],
    )[17 : 17 + len(PROMPTS)]
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_seeds_differ_and_repeat(engine):
    batch = [request(PROMPTS[3], seed=s, label="seeds") for s in range(8)]
    first = [tuple(g.token_ids.tolist()) for g in engine.call("generate_many", batch)]
    assert first == [tuple(g.token_ids.tolist()) for g in engine.call("generate_many", batch)]
    assert len(set(first)) > 1


def test_sample_frequencies_match_the_probabilities(engine):
    """Compare the first tokens of 2,000 seeds with the probabilities that the engine reports for them."""
    batch = [
        GenerationRequest(
            request_id=f"spread-{s}",
            token_ids=PROMPTS[2],
            sampling=Sampling(temperature=1.0, max_new_tokens=1, seed=s),
        )
        for s in range(2000)
    ]
    generations = engine.call("generate_many", batch)
    probability = {int(g.token_ids[0]): float(np.exp(g.logprobs[0])) for g in generations}
    counts = {t: sum(int(g.token_ids[0]) == t for g in generations) for t in probability}
    for token, p in probability.items():
        if p > 0.02:
            assert abs(counts[token] / 2000 - p) < 5 * (p * (1 - p) / 2000) ** 0.5, token


def test_seeded_hash_is_uniform_and_depends_on_all_inputs():
    seeds, positions, columns = torch.arange(64), torch.arange(64) * 7, torch.arange(512)
    values = seeded_hash(seeds, positions, columns)
    assert values.shape == (64, 512)
    assert values.min() >= 0
    assert values.max() < 2**32
    assert len(values.unique()) > 0.9999 * values.numel()
    uniform = values.double() / 2**32
    assert abs(uniform.mean() - 0.5) < 0.01
    counts = torch.histc(uniform.float(), bins=32, min=0, max=1)
    assert ((counts - 1024).abs() < 6 * 1024**0.5).all()
    correlation = torch.corrcoef(torch.stack([uniform[:, :-1].flatten(), uniform[:, 1:].flatten()]))[0, 1]
    assert abs(correlation) < 0.03
    for change in ((seeds + 1, positions, columns), (seeds, positions + 1, columns), (seeds, positions, columns + 1)):
        assert (seeded_hash(*change) != values).double().mean() > 0.999
