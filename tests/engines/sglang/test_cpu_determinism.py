"""A completion depends only on prompt, seed and weights, not on the batch; `test_agreement.py` has other families."""

from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.engines.sglang.cpu import batching
from megarl.engines.sglang.cpu.batching import (
    can_share,
    decode,
    extend,
    find_shared_prompts,
    group_sequences,
    repeated_tokens,
    select_first,
)
from megarl.engines.sglang.cpu.determinism import seeded_hash
from tests.engines.remote import requests

PROMPTS = [tuple((11 * i + 3 * j) % 240 for j in range(4 + 5 * i)) for i in range(7)]


def test_completion_does_not_depend_on_the_batch(engine):
    assert_batch_independent(engine)


def assert_batch_independent(engine):
    alone = [engine.generate([prompt], seeds=[i])[0] for i, prompt in enumerate(PROMPTS)]
    others = requests([p for p in PROMPTS for _ in range(6)], seeds=[100 + i for _ in PROMPTS for i in range(6)])
    ours = requests(PROMPTS, seeds=range(len(PROMPTS)))
    together = engine.call("generate_many", [*others[:17], *ours, *others[17:]])[17 : 17 + len(PROMPTS)]
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_seeds_differ_and_repeat(engine):
    first, again = (engine.generate([PROMPTS[3]] * 8, seeds=range(8)) for _ in range(2))
    first = [tuple(g.token_ids.tolist()) for g in first]
    assert first == [tuple(g.token_ids.tolist()) for g in again]
    assert len(set(first)) > 1


def test_sample_frequencies_match_the_probabilities(engine):
    """Compare the first tokens of 2,000 seeds with the probabilities that the engine reports for them."""
    generations = engine.generate([PROMPTS[2]] * 2000, seeds=range(2000), max_new_tokens=1)
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


SHARED = [(5, 6, 7), (5, 6), (5, 6, 7), (8,), (5, 6), (5, 6, 7, 8)]


def make_batch(prompts: list[tuple[int, ...]]) -> Any:
    """Return the fields of SGLang's `ForwardBatch` that matter."""
    lengths = [len(prompt) for prompt in prompts]
    seq_lens = torch.tensor(lengths)
    fields = {
        **dict.fromkeys(("seq_lens", "seq_lens_cpu", "orig_seq_lens", "extend_seq_lens"), seq_lens),
        **dict.fromkeys(("extend_seq_lens_cpu", "extend_logprob_start_lens_cpu"), lengths),
        **dict.fromkeys(("seq_lens_sum", "extend_num_tokens"), sum(lengths)),
        **dict.fromkeys(("extend_prefix_lens_cpu", "top_logprobs_nums"), [0] * len(prompts)),
        **dict.fromkeys(("token_ids_logprobs", "lora_ids"), [None] * len(prompts)),
        **dict.fromkeys(("req_pool_indices_cpu", "rids", "mm_inputs", "num_token_non_padded", "input_embeds")),
        "input_ids": torch.tensor([token for prompt in prompts for token in prompt]),
        "positions": torch.cat([torch.arange(n) for n in lengths]),
        "out_cache_loc": torch.arange(sum(lengths)) + 10,
        "req_pool_indices": torch.arange(len(prompts)) + 3,
        "extend_prefix_lens": torch.zeros_like(seq_lens),
        "extend_start_loc": torch.cumsum(seq_lens, 0) - seq_lens,
        "batch_size": len(prompts),
        "extend_input_logprob_token_ids_gpu": torch.zeros(0),
        "capture_hidden_mode": SimpleNamespace(need_capture=lambda: False),
        "forward_mode": SimpleNamespace(name="EXTEND"),
    }
    return make_dataclass("Batch", fields)(**fields)


def test_distinct_prompts_are_found() -> None:
    shared = find_shared_prompts([token for prompt in SHARED for token in prompt], [len(p) for p in SHARED])
    assert shared.first_M == [0, 1, 3, 5]
    assert [SHARED[shared.first_M[prompt]] for prompt in shared.prompt_N] == SHARED
    computed = [token for request in shared.first_M for token in SHARED[request]]
    tokens = repeated_tokens(shared, [len(p) for p in SHARED])
    assert [computed[token] for token in tokens] == [token for prompt in SHARED for token in prompt]


def test_a_batch_of_the_distinct_prompts() -> None:
    batch = make_batch(SHARED)
    selected = select_first(batch, [0, 3, 5])
    expected = make_batch([SHARED[0], SHARED[3], SHARED[5]])
    expected.out_cache_loc = torch.tensor([10, 11, 12, 18, 21, 22, 23, 24])
    expected.req_pool_indices = torch.tensor([3, 6, 8])
    for name, value in vars(expected).items():
        got = getattr(selected, name)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value or "mode" in name, name
    assert batch.batch_size == len(SHARED)


@pytest.mark.parametrize(
    "change",
    [
        {"extend_prefix_lens_cpu": [0, 0, 1, 0, 0, 0]},
        {"extend_logprob_start_lens_cpu": [0] * 6},
        {"lora_ids": ["a", *[None] * 5]},
        {"mm_inputs": [object()] * 6},
        {"input_embeds": torch.zeros(1)},
        {"extend_input_logprob_token_ids_gpu": torch.zeros(1)},
        {"forward_mode": SimpleNamespace(name="MIXED")},
        {"capture_hidden_mode": SimpleNamespace(need_capture=lambda: True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_batches_are_left_alone(change: dict[str, Any]):
    batch = make_batch(SHARED)
    assert can_share(batch)
    for name, value in change.items():
        setattr(batch, name, value)
    assert not can_share(batch)


def test_an_engine_computes_the_prompt_of_many_samples_once(engine):
    """Compare the CPU seconds of the scheduler for samples of one prompt with those for as many prompts."""
    (scheduler,) = engine.scheduler_processes()

    def seconds(prompts):
        before = sum(scheduler.cpu_times()[:2])
        engine.generate(prompts, max_new_tokens=1)
        return sum(scheduler.cpu_times()[:2]) - before

    distinct = [[(i + j * (1 + i % 7)) % 240 for j in range(400)] for i in range(24)]
    seconds(distinct)
    assert 3 * seconds(distinct[:1] * len(distinct)) < seconds(distinct)


HEADS, KEY_HEADS, HEAD_SIZE, CACHE_ROWS, MAX_LENGTH = 4, 2, 16, 4096, 300
LENGTHS = (1, 31, 63, 64, 65, 128, 200, 200, 201, 299, 7, 300)


@pytest.fixture(autouse=True)
def one_thread():
    """Sums depend on the threads that share a call; the deterministic engine has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Batch:
    """Sequences whose keys and values are at random rows of the cache."""

    def __init__(self, lengths, prefixes=None):
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(CACHE_ROWS, KEY_HEADS, HEAD_SIZE, generator=generator)
        self.values = torch.randn(CACHE_ROWS, KEY_HEADS, HEAD_SIZE, generator=generator)
        self.lengths = torch.tensor(lengths)
        self.prefixes = self.lengths - 1 if prefixes is None else torch.tensor(prefixes)
        self.pool_rows = torch.randperm(len(lengths), generator=generator)
        rows = torch.randperm(CACHE_ROWS, generator=generator)[: sum(lengths)]
        self.cache_rows = rows.split(lengths)
        self.req_to_token = torch.zeros(len(lengths), MAX_LENGTH, dtype=torch.int32)
        for pool_row, own in zip(self.pool_rows, self.cache_rows, strict=True):
            self.req_to_token[pool_row, : len(own)] = own
        used = torch.zeros(CACHE_ROWS, dtype=torch.bool)
        used[rows] = True
        self.keys[~used], self.values[~used] = torch.nan, torch.nan  # rows of other requests must not be read
        self.sizes = (self.lengths - self.prefixes).tolist()
        self.query = torch.randn(sum(self.sizes), HEADS, HEAD_SIZE, generator=generator)

    def attend(self, rows):
        """Return the attention of some of the sequences in one batch, one tensor each."""
        query = torch.cat([self.query.split(self.sizes)[row] for row in rows])
        groups = group_sequences(self.lengths[rows], self.pool_rows[rows], self.req_to_token)
        if max(self.sizes) == 1:
            attended = decode(query, self.keys, self.values, groups, None)
        else:
            attended = extend(query, self.keys, self.values, groups, self.prefixes[rows], None)
        return attended.split([self.sizes[row] for row in rows])

    def expected(self, row):
        """Return the attention of one sequence in float64."""
        query = self.query.split(self.sizes)[row].double()
        keys, values = (
            cache[self.cache_rows[row]].double().repeat_interleave(HEADS // KEY_HEADS, 1)
            for cache in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys) / HEAD_SIZE**0.5
        length, prefix = len(keys), int(self.prefixes[row])
        is_later = torch.arange(length)[None] > torch.arange(prefix, length)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, -torch.inf).softmax(-1), values)


BATCHES = {
    "decode": Batch(LENGTHS),
    "prompts": Batch(LENGTHS, [0] * len(LENGTHS)),
    "prompts with prefixes": Batch(LENGTHS, [0, 30, 0, 63, 64, 1, 150, 0, 200, 0, 6, 299]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_attention_equals_a_softmax(batch):
    for row, attended in enumerate(batch.attend(range(len(LENGTHS)))):
        torch.testing.assert_close(attended.double(), batch.expected(row), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_tokens", [batching.MAX_TOKENS, 400])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_attention_of_a_sequence_does_not_depend_on_the_others(batch, max_tokens, monkeypatch):
    together = batch.attend(range(len(LENGTHS)))
    monkeypatch.setattr(batching, "MAX_TOKENS", max_tokens)
    alone = [[row] for row in range(len(LENGTHS))]
    for rows in (*alone, range(0, len(LENGTHS), 2), [6, 7], range(len(LENGTHS) - 1, -1, -1)):
        for row, attended in zip(rows, batch.attend(rows), strict=True):
            assert torch.equal(attended, together[row])


def test_decoding_in_bfloat16():
    batch = BATCHES["decode"]
    groups = group_sequences(batch.lengths, batch.pool_rows, batch.req_to_token)
    query, keys, values = (x.bfloat16() for x in (batch.query, batch.keys, batch.values))
    attended = decode(query, keys, values, groups, None)
    assert attended.dtype == torch.bfloat16
    expected = torch.cat([batch.expected(row) for row in range(len(LENGTHS))])
    torch.testing.assert_close(attended.double(), expected, atol=2e-2, rtol=2e-2)
