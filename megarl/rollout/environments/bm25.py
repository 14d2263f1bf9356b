"""Ranking of passages by the words that they share with a query: Okapi BM25."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return WORD.findall(text.lower())


class Bm25:
    """An index of passages.

    The score of passage D for query Q is the sum over q in Q of

        idf(q) f(q,D) (k1+1) / (f(q,D) + k1 (1 - b + b |D| / mean |D|))

    with idf(q) = log((N - n(q) + 0.5) / (n(q) + 0.5)), from Robertson and Zaragoza, "The Probabilistic Relevance
    Framework: BM25 and Beyond" (2009), section 3. Words in more than half of the passages have a negative idf, and get
    `epsilon` times the mean idf instead.
    """

    def __init__(
        self, passages: Sequence[Sequence[str]], *, k1: float = 1.5, b: float = 0.75, epsilon: float = 0.25
    ) -> None:
        """Index passages, given as words.

        Raises:
            ValueError: there are none.
        """
        if not passages:
            raise ValueError("an index needs at least one passage, got none")
        self._k1 = k1
        self._postings: dict[str, list[tuple[int, int]]] = {}
        lengths = [len(passage) for passage in passages]
        mean = sum(lengths) / len(lengths) or 1.0
        self._norms = [k1 * (1 - b + b * length / mean) for length in lengths]
        for i, passage in enumerate(passages):
            for word, count in Counter(passage).items():
                self._postings.setdefault(word, []).append((i, count))
        total = len(passages)
        self._idf = {w: math.log((total - len(p) + 0.5) / (len(p) + 0.5)) for w, p in self._postings.items()}
        floor = epsilon * sum(self._idf.values()) / max(1, len(self._idf))
        self._idf = {word: floor if idf < 0 else idf for word, idf in self._idf.items()}

    def scores(self, query: Sequence[str]) -> list[float]:
        """Return the score of each passage."""
        found = [0.0] * len(self._norms)
        for word in query:
            for i, count in self._postings.get(word, ()):
                found[i] += self._idf[word] * count * (self._k1 + 1) / (count + self._norms[i])
        return found

    def top(self, query: Sequence[str], count: int) -> list[int]:
        """Return the passages with the highest scores that share a word with the query, best first."""
        scores = self.scores(query)
        found = {i for word in query for i, _ in self._postings.get(word, ())}
        return sorted(found, key=lambda i: (-scores[i], i))[:count]
