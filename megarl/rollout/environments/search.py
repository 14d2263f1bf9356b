"""Questions that are answered with a search: the policy writes queries, reads passages, and gives an answer."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.section import expand_home
from megarl.data.rows import read_rows
from megarl.errors import AgentError
from megarl.rollout.environments.environment import Step, Task, require_answers

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


QUERY = re.compile(r"search\(([^()\n]*)\)")
"""The call of a search in a reply."""

MARK = "####"
"""Begins the answer, which is the rest of the reply and one line."""

PAIR = 2


class Passages:
    """Passages with titles, and their index."""

    def __init__(self, passages: Sequence[tuple[str, str]]) -> None:
        """`passages`: title and text of each."""
        self._passages = passages
        self._index = Bm25([words(f"{title} {text}") for title, text in passages])

    def find(self, query: str, count: int) -> str:
        """Return the best passages as text, a line for each."""
        found = [self._passages[i] for i in self._index.top(words(query), count)]
        return "\n".join(f"{title}: {text}" for title, text in found) or "nothing found"


class Search:
    """Answers the first `search(...)` of a reply with passages, until a reply has none.

    That reply needs to end in `#### <answer>`; the reward is 1 if it equals that of the row (`data.fields.answer`)
    without case, punctuation and articles, as in HotpotQA's exact match. Passages are those of `index`, or those of the
    row's field `context` in HotpotQA's published formats.

    Examples:
        >>> from megarl.batch.trajectory import Prompt
        >>> row = {"context": [["Ada Lovelace", ["Ada Lovelace was born in London."]], ["Lund", ["Lund is a city."]]]}
        >>> prompt = Prompt(prompt_id="dev.jsonl:1", text="Where is she from?", token_ids=(), row=row, answer="London")
        >>> environment = Search(num_passages=1)
        >>> messages = [{"role": "user", "content": prompt.text}]
        >>> environment.reset(Task(prompt=prompt, messages=messages, seed=0, shared={}))
        >>> environment.step("search(Ada Lovelace)").messages[0]["content"]
        'Ada Lovelace: Ada Lovelace was born in London.'
        >>> environment.step("#### london").reward
        1.0
    """

    def __init__(self, *, index: str | None = None, num_passages: int = 2, role: str = "tool") -> None:
        """Choose the passages.

        Args:
            index: file of rows `{"title", "text"}`; None: the rows have passages of their own.
            num_passages: largest number of passages that a search finds.
            role: role of the messages with passages.
        """
        if num_passages < 1:
            raise AgentError(f"rollout.env.kwargs.num_passages needs to be at least 1, got {num_passages}")
        self._index = None if index is None else expand_home(index)
        self._num_passages, self._role = num_passages, role
        self._passages: Passages | None = None
        self._answers: list[str] = []

    def reset(self, task: Task) -> None:
        """Begin with the messages of the row.

        Raises:
            ValueError: the row has no answer, or no passages.
        """
        self._answers = [normalize(answer) for answer in require_answers(task)]
        if self._index is None:
            self._passages = Passages(read_context(task.prompt.row, task.prompt.prompt_id))
            return
        key = f"megarl.search:{self._index}"
        if key not in task.shared:
            task.shared[key] = read_index(self._index)
        self._passages = task.shared[key]

    def step(self, reply: str) -> Step:
        """Return the passages of a search, or the reward of an answer."""
        query = QUERY.search(reply)
        if query is None:
            return Step(reward=float(is_answer(reply, self._answers)), done=True)
        assert self._passages is not None
        text = self._passages.find(query.group(1), self._num_passages)
        return Step(messages=[{"role": self._role, "content": text}], num_calls=1)

    def close(self) -> None:
        """Do nothing: an episode holds no resources."""


def read_index(path: str) -> Passages:
    """Return the passages of a file of rows `{"title", "text"}`.

    Raises:
        DataError: the file cannot be read.
        ValueError: a row has no such texts, or there are no rows.
    """
    passages = []
    for row in read_rows(Path(path)):
        title, text = row.fields.get("title"), row.fields.get("text")
        if not isinstance(title, str) or not isinstance(text, str):
            raise ValueError(f"{path}:{row.line} needs the texts title and text, got {sorted(row.fields)}")  # noqa: TRY004
        passages.append((title, text))
    return Passages(passages)


def read_context(row: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Return title and text of the passages in a row of HotpotQA.

    Both published formats are read: pairs `[title, [sentence, ...]]`, and
    `{"title": [...], "sentences": [[...], ...]}`.

    Raises:
        ValueError: the row has neither; `where` names it.
    """
    context = row.get("context")
    if isinstance(context, Mapping) and {"title", "sentences"} <= context.keys():
        context = list(zip(context["title"], context["sentences"], strict=True))
    if not isinstance(context, list) or not context or not all(len(pair) == PAIR for pair in context):
        raise ValueError(f"{where} needs passages in `context`, as HotpotQA has them, got {str(context)[:100]}")
    return [(str(title), "".join(map(str, sentences)).strip()) for title, sentences in context]


def is_answer(reply: str, expected: Sequence[str]) -> bool:
    """Return whether a reply ends in `#### <answer>` with one of the answers `expected`, which are normalized.

    A regular expression for it takes minutes for a reply with thousands of spaces.
    """
    before, newline, last = reply.rstrip().rpartition("\n")
    if newline and before.rstrip().endswith(MARK):
        return normalize(last) == expected
    _, mark, answer = last.partition(MARK)
    return bool(mark and answer) and normalize(answer) in expected


def normalize(answer: str) -> str:
    """Return an answer in lower case without punctuation, articles and repeated spaces, as in SQuAD."""
    plain = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(word for word in plain.split() if word not in {"a", "an", "the"})
