"""The reward of the example, and its control: the same rewards without relation to the completions."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from megarl import Trajectory

SENTENCE = re.compile(r"[A-Z][^.!?\n]*\.")
MIN_WORDS, MAX_WORDS = 6, 16


def sentence(trajectory: Trajectory, text: str, row: Mapping[str, str]) -> float:
    """Return 1 if the text is one sentence of 6 to 16 words that has both words of the row, otherwise 0."""
    words = re.findall(r"[a-z'-]+", text.lower())
    fits = SENTENCE.fullmatch(text.strip()) is not None and MIN_WORDS <= len(words) <= MAX_WORDS
    return float(fits and set(row["words"].split()) <= set(words))


def shuffled(trajectories: Sequence[Trajectory], texts: Sequence[str], row: Mapping[str, str]) -> list[float]:
    """Return the rewards of a group in an order that depends on its texts only by chance."""
    rewards = [sentence(trajectory, text, row) for trajectory, text in zip(trajectories, texts, strict=True)]
    random.Random(repr(texts)).shuffle(rewards)
    return rewards
