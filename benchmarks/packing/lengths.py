"""Batches of sequence lengths: synthetic ones, and those of GSM8K."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megarl.data.rows import read_rows
from megarl.errors import DataError

LIMITS = (16, 16384)
"""Shortest and longest length of the lognormal workload, in tokens."""

TOKEN = re.compile(r"[^\W\d_]+|\d|[^\w\s]|_")
"""Matches a word, a digit or a punctuation mark, which approximates byte-level BPE on English and numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingWorkload:
    """Sequence lengths of one training step."""

    name: str
    max_tokens: int
    """Token budget of one micro-batch."""
    lengths_N: NDArray[np.int64]
    """Lengths in arrival order [N]."""


def make_packing_workloads(count: int, seed: int) -> Iterator[PackingWorkload]:
    """Yield long-tailed, bimodal and uniform lengths of `count` sequences."""
    rng = np.random.default_rng(seed)
    long_tailed = np.clip(rng.lognormal(mean=6.5, sigma=1.0, size=count), *LIMITS).astype(np.int64)
    short, long = rng.integers(100, 500, count), rng.integers(6000, 8192, count)
    bimodal = np.where(rng.random(count) < 0.1, long, short)
    uniform = rng.integers(1, 4096, count)
    for name, lengths_N in (("lognormal", long_tailed), ("bimodal", bimodal), ("uniform", uniform)):
        yield PackingWorkload(name=name, max_tokens=16384, lengths_N=lengths_N)


class Gsm8k:
    """Lengths of GSM8K's questions with answers, from a folder with its `train.jsonl`."""

    MAX_TOKENS: Final = 4096

    def __init__(self, folder: Path) -> None:
        """Raises DataError if the file cannot be read."""
        rows = read_rows(folder / "train.jsonl")
        texts = (row.text("question", "question") + "\n" + row.text("answer", "answer") for row in rows)
        self._lengths = np.array([len(TOKEN.findall(text)) for text in texts], np.int64)

    def sample(self, count: int, seed: int) -> PackingWorkload:
        """Sample `count` rows without replacement.

        Raises:
            DataError: the data set has fewer rows.
        """
        if count > len(self._lengths):
            raise DataError(f"GSM8K needs {count} rows to sample --sequences, got {len(self._lengths)}")
        lengths_N = np.random.default_rng(seed).choice(self._lengths, count, replace=False)
        return PackingWorkload(name="gsm8k", max_tokens=self.MAX_TOKENS, lengths_N=lengths_N)
