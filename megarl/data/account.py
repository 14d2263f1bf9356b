"""The account of a data file: its format, the use of each column, equal rows, rows left out, and lengths in tokens.

All rows are read once, as a stream, by the code that reads them for training: an account takes 24 bytes of memory a
row, and a sample of rows.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.data.rows import Row
from megarl.errors import DataError
from megarl.text import replace_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGEST_BYTES = 8
"""Two different rows have the same digest with probability 2^-64: one pair among a million rows in 37 million files."""


def digest_text(text: str) -> int:
    """Return the digest of a text whose runs of whitespace count as one space, and those at its ends not at all."""
    return _digest(" ".join(text.split()))


def digest_fields(fields: Mapping[str, Any]) -> int:
    """Return the digest of all fields of a row, whatever their order; dates, decimals and bytes count as their repr."""
    return _digest(json.dumps(fields, sort_keys=True, ensure_ascii=False, default=repr))


def _digest(text: str) -> int:
    # a Parquet file may hold unpaired surrogates, which have no UTF-8
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=DIGEST_BYTES).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualRows:
    """How many rows equal others, and the first of them."""

    count: int
    example: tuple[str, str] | None = None
    """Places `<file>:<line>` of the first such row and of the row that it equals; None if there is none."""


class RowDigests:
    """A digest of each row of a file, or of its shards, with the row's place."""

    def __init__(self) -> None:
        self._digests, self._lines = array("Q"), array("I")
        self._starts: list[int] = []
        """Number of the first row of each shard."""
        self._shards: list[Path] = []

    def add(self, row: Row, digest: int) -> None:
        """Append the digest of the next row."""
        if not self._shards or self._shards[-1] != row.path:
            self._starts.append(len(self._lines))
            self._shards.append(row.path)
        self._lines.append(row.line)
        self._digests.append(digest)

    def __len__(self) -> int:
        return len(self._lines)

    def find_repeats(self) -> EqualRows:
        """Return the rows with the digest of an earlier row."""
        digests_N = self._as_array()
        order_N = np.argsort(digests_N, kind="stable")
        sorted_N = digests_N[order_N]
        repeated = order_N[1:][sorted_N[1:] == sorted_N[:-1]]
        if not len(repeated):
            return EqualRows(count=0)
        second = int(repeated.min())
        first = int(order_N[np.searchsorted(sorted_N, digests_N[second])])  # a stable sort: the earliest one
        return EqualRows(count=len(repeated), example=(self._place(second), self._place(first)))

    def find_shared(self, other: RowDigests) -> EqualRows:
        """Return the rows with the digest of any row of `other`."""
        digests_N, other_M = self._as_array(), other._as_array()
        shared = np.flatnonzero(np.isin(digests_N, other_M))
        if not len(shared):
            return EqualRows(count=0)
        first = int(shared[0])
        equal = int(np.flatnonzero(other_M == digests_N[first])[0])
        return EqualRows(count=len(shared), example=(self._place(first), other._place(equal)))

    def _as_array(self) -> NDArray[np.uint64]:
        """Return the digests as an array that shares their memory."""
        return np.frombuffer(self._digests, np.uint64) if self._digests else np.empty(0, np.uint64)

    def _place(self, index: int) -> str:
        """Return the place of a row by its number, from 0."""
        shard = self._shards[bisect_right(self._starts, index) - 1]
        return f"{replace_surrogates(str(shard))}:{self._lines[index]}"


SAMPLE_ROWS = 2000
"""Number of rows, drawn at random, whose lengths are measured."""

OBSERVED_ROWS = 100
"""Number of rows at the start of a file by which the use of its columns is found."""

MAX_REASONS = 20
"""Number of reasons to leave rows out that are counted one by one."""

OTHER_REASONS = "other reasons"

QUANTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
"""Name -> share of the rows that are at most as long."""

TYPE_NAMES: Mapping[type, str] = {str: "text", int: "integer", float: "number", bool: "boolean", dict: "object"}
"""Python type -> its name in an account; others keep their own."""


class RowContent(NamedTuple):
    """What the account of a file needs of a row."""

    prompt: str
    """The prompt as text; of messages, their roles and contents."""
    is_text: bool
    """Whether the row holds texts; else messages."""


ReadRow = Callable[[Row], RowContent | None]
"""Reads a row as training does. Returns None if the row is dropped without an error.

Raises:
    DataError: the row cannot be used.
"""


class ObservedFields(dict[str, Any]):
    """The fields of a row; notes the names of those that are read."""

    def __init__(self, fields: Mapping[str, Any], used: set[str]) -> None:
        super().__init__(fields)
        self._used = used

    def __getitem__(self, name: str) -> Any:
        self._used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or `default`."""
        if name in self:
            self._used.add(name)
        return super().get(name, default)


def _observe(row: Row, names: set[str]) -> Row:
    """Return the row with fields that add the names of those that are read to `names`."""
    return row._replace(fields=ObservedFields(row.fields, names))


@dataclass(slots=True, kw_only=True)
class LeftOut:
    """Rows that are left out for one reason."""

    count: int
    example: str
    """Place `<file>:<line>` of the first one."""


class RowSample:
    """A uniform sample of at most `size` rows of a stream, in the order of the stream (Vitter 1985, algorithm R)."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size, self._random = size, random.Random(seed)  # not a secret
        self._rows: list[tuple[int, Row]] = []
        self._num_seen = 0

    def add(self, row: Row) -> None:
        """Take the next row of the stream."""
        if len(self._rows) < self._size:
            self._rows.append((self._num_seen, row))
        elif (slot := self._random.randrange(self._num_seen + 1)) < self._size:
            self._rows[slot] = (self._num_seen, row)
        self._num_seen += 1

    def __iter__(self) -> Iterator[Row]:
        return iter([row for _, row in sorted(self._rows, key=lambda each: each[0])])


class FileAccount:
    """Counts of the rows of one file; `add` takes them one by one."""

    def __init__(
        self,
        path: str,
        read: ReadRow,
        has_answer: Callable[[Row], bool],
        *,
        num_first: int = 0,
        sample_rows: int = SAMPLE_ROWS,
    ) -> None:
        """Make the account of a file without rows.

        Args:
            has_answer: returns whether a usable row has a reference answer.
            num_first: number of usable rows at the start of the file to keep.
            sample_rows: number of usable rows to draw.
        """
        self.path, self._read, self._has_answer = path, read, has_answer
        self.num_rows = self.num_usable = self.num_texts = self.num_answers = 0
        """Rows, those that can be used, and among these those of texts and those with a reference answer."""
        self.columns: dict[str, Counter[str]] = {}
        """Column -> type -> number of rows with such a value; null counts as no value."""
        self.used: set[str] = set()
        """Columns that are read to render a row."""
        self.answers: set[str] = set()
        """Columns that are read to find the reference answer of a row."""
        self.left_out: dict[str, LeftOut] = {}
        """Reason -> rows that cannot be used."""
        self.first: list[Row] = []
        self._num_first = num_first
        self.sample = RowSample(sample_rows)
        self.rows, self.prompts = RowDigests(), RowDigests()
        """Digests of all rows, and of the prompts of those that can be used."""

    def add(self, row: Row) -> bool:
        """Count a row; return whether it can be used."""
        for name, value in row.fields.items():
            types = self.columns.get(name)
            if types is None:
                types = self.columns[name] = Counter()
            if value is not None:
                kind = type(value)
                types[TYPE_NAMES.get(kind, kind.__name__)] += 1
        self.rows.add(row, digest_fields(row.fields))
        is_observed = self.num_rows < OBSERVED_ROWS
        self.num_rows += 1
        try:
            content = self._read(_observe(row, self.used) if is_observed else row)
        except DataError as e:
            self.leave_out(row, str(e).removeprefix(f"{row.where}: "))
            return False
        if content is None:
            self.leave_out(row, "both answers are rated as equal")
            return False
        self.num_usable += 1
        self.num_texts += content.is_text
        self.num_answers += self._has_answer(_observe(row, self.answers) if is_observed else row)
        self.prompts.add(row, digest_text(content.prompt))
        if len(self.first) < self._num_first:
            self.first.append(row)
        self.sample.add(row)
        return True

    def leave_out(self, row: Row, reason: str) -> None:
        """Count a row that cannot be used."""
        if reason not in self.left_out and len(self.left_out) >= MAX_REASONS:
            reason = OTHER_REASONS
        found = self.left_out.setdefault(reason, LeftOut(count=0, example=row.where))
        found.count += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in tokens of a sample of rows."""

    num_rows: int
    """Size of the sample."""
    quantiles: Mapping[str, int]
    """Name of `QUANTILES` -> length that this share of the rows does not exceed."""
    limit: int
    num_longer: int
    """Rows of the sample above the limit."""


def measure_lengths(lengths: Sequence[int], limit: int) -> Lengths:
    """Return the quantiles of `lengths`, of which there is at least one, by the nearest rank.

    Examples:
        >>> measure_lengths([5, 1, 3], limit=4).quantiles["median"]
        3
    """
    ordered = sorted(lengths)
    ranks = {name: math.ceil(share * len(ordered)) for name, share in QUANTILES.items()}
    return Lengths(
        num_rows=len(ordered),
        quantiles={name: ordered[rank - 1] for name, rank in ranks.items()},
        limit=limit,
        num_longer=sum(length > limit for length in ordered),
    )


class Segment(NamedTuple):
    """A run of tokens that are all trained on, or all not."""

    text: str
    is_trained: bool


def split_by_mask(
    tokenizer: PreTrainedTokenizerBase, token_ids_T: Sequence[int], loss_mask_T: Sequence[bool]
) -> list[Segment]:
    """Return the text of T tokens, cut where the loss mask changes.

    Each text is what its tokens add to the text of those before, since a tokenizer may write a token in another way at
    the start of a text.
    """
    segments, shown = list[Segment](), ""
    for end in range(1, len(token_ids_T) + 1):
        if end < len(token_ids_T) and loss_mask_T[end] == loss_mask_T[end - 1]:
            continue
        text = tokenizer.decode(list(token_ids_T[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        segments.append(Segment(text[len(shown) :], bool(loss_mask_T[end - 1])))
        shown = text
    return segments
