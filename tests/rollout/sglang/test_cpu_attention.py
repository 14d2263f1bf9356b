"""Attention over many sequences at once: against a softmax in float64, and independent of the batch bit for bit."""

import pytest
import torch

from megarl.rollout.sglang import cpu_attention
from megarl.rollout.sglang.cpu_attention import decode, extend, group_sequences

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
        count = int((self.lengths - self.prefixes).sum())
        self.query = torch.randn(count, HEADS, HEAD_SIZE, generator=generator)

    def attend(self, rows):
        """Return the attention of some of the sequences in one batch, one tensor each."""
        sizes = (self.lengths - self.prefixes).tolist()
        query = torch.cat([self.query.split(sizes)[row] for row in rows])
        groups = group_sequences(self.lengths[rows], self.pool_rows[rows], self.req_to_token)
        if max(sizes) == 1:
            attended = decode(query, self.keys, self.values, groups, None)
        else:
            attended = extend(query, self.keys, self.values, groups, self.prefixes[rows], None)
        return attended.split([sizes[row] for row in rows])

    def expected(self, row):
        """Return the attention of one sequence in float64."""
        sizes = (self.lengths - self.prefixes).tolist()
        query = self.query.split(sizes)[row].double()
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


@pytest.mark.parametrize("max_tokens", [cpu_attention.MAX_TOKENS, 400])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_attention_of_a_sequence_does_not_depend_on_the_others(batch, max_tokens, monkeypatch):
    together = batch.attend(range(len(LENGTHS)))
    monkeypatch.setattr(cpu_attention, "MAX_TOKENS", max_tokens)
    for rows in ([row] for row in range(len(LENGTHS))):
        assert torch.equal(batch.attend(rows)[0], together[rows[0]])
    for rows in (range(0, len(LENGTHS), 2), [6, 7], range(len(LENGTHS) - 1, -1, -1)):
        for row, attended in zip(rows, batch.attend(rows), strict=True):
            assert torch.equal(attended, together[row])


def test_decoding_in_bfloat16():
    batch, rows = BATCHES["decode"], range(len(LENGTHS))
    groups = group_sequences(batch.lengths, batch.pool_rows, batch.req_to_token)
    query, keys, values = (x.bfloat16() for x in (batch.query, batch.keys, batch.values))
    attended = decode(query, keys, values, groups, None)
    assert attended.dtype == torch.bfloat16
    expected = torch.cat([batch.expected(row) for row in rows])
    torch.testing.assert_close(attended.double(), expected, atol=2e-2, rtol=2e-2)
