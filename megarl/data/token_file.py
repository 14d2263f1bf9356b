"""Files of token sequences, one JSON object per line, and files of their scores.

    {"id": "a", "token_ids": [5, 9, 2]}  ->  {"id": "a", "logprobs": [-1.25, -0.5], "entropy": [2.0, 1.5]}

Files may be larger than memory: lines are read in chunks and dropped after scoring.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from megarl.data.rows import track
from megarl.errors import ConfigError, DataError
from megarl.model_files.json_object import refuse_lfs_pointer

MAX_REPORTED_LINES = 20
"""Maximum number of bad lines that an error lists; further ones are only counted."""

LINES_PER_BATCH = 1024
"""Lines per update of the progress bar while a file is checked."""

SCORE_KEYS = ("logprobs", "entropy")
"""Keys that scoring adds to a line, replacing existing ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """A sequence of T tokens from one line of a file."""

    where: str
    """`<path>:<line>`, to start an error message with."""

    token_ids: NDArray[np.int32]
    """[T]: token ids, T >= 1."""

    other_keys: dict[str, Any]
    """All keys of the line except `token_ids`."""

    def to_json_line(self, logprobs: NDArray[np.float32], entropy: NDArray[np.float32]) -> str:
        """Return the line of scores without a newline: `other_keys`, and both scores as lists of length T - 1.

        Raises:
            DataError: a score is not finite, which JSON cannot represent.
        """
        for name, values in zip(SCORE_KEYS, (logprobs, entropy), strict=True):
            assert len(values) == len(self.token_ids) - 1, f"{self.where}: {len(values)} {name}"
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                raise DataError(f"{self.where}: the model needs to give a finite {name}[{at}], got {values[at]}")
        other_keys = {key: value for key, value in self.other_keys.items() if key not in SCORE_KEYS}
        scores = {"logprobs": _to_json_numbers(logprobs), "entropy": _to_json_numbers(entropy)}
        return json.dumps(other_keys | scores, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Number of lines and tokens to score."""

    num_lines: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of token sequences for one model. Blank lines are skipped; keys other than `token_ids` are kept."""

    path: Path
    vocab_size: int
    max_positions: int

    def check(self) -> TokenCount:
        """Validate all lines of the file and count them.

        Raises:
            DataError: the file does not exist or has no sequences, or lines are bad; the message lists the first
                `MAX_REPORTED_LINES`.
        """
        self._require_file()
        problems: list[str] = []
        num_problems = num_lines = num_tokens = 0
        for batch in track(self._batches(), f"checking {self.path.name}"):
            for number, raw in batch:
                try:
                    num_tokens += len(self._parse(number, raw).token_ids)
                except DataError as e:
                    num_problems += 1
                    if num_problems <= MAX_REPORTED_LINES:
                        problems.append(str(e))
            num_lines += len(batch)
        if not num_lines:
            raise DataError(f"{self.path}: the file has no token sequences")
        if num_problems > MAX_REPORTED_LINES:
            problems.append(f"{self.path}: {num_problems - MAX_REPORTED_LINES} more bad lines, {num_problems} in total")
        if problems:
            raise DataError("\n".join(problems))
        return TokenCount(num_lines=num_lines, num_tokens=num_tokens)

    def chunks(self, *, max_tokens: int, max_lines: int) -> Iterator[list[TokenSequence]]:
        """Yield the sequences in order, in lists of at most `max_tokens` tokens and `max_lines` lines.

        A sequence longer than `max_tokens` forms a separate list.

        Raises:
            DataError: a line is bad.
        """
        chunk: list[TokenSequence] = []
        num_tokens = 0
        for number, raw in self._raw_lines():
            line = self._parse(number, raw)
            if chunk and (num_tokens + len(line.token_ids) > max_tokens or len(chunk) == max_lines):
                yield chunk
                chunk, num_tokens = [], 0
            chunk.append(line)
            num_tokens += len(line.token_ids)
        if chunk:
            yield chunk

    def _require_file(self) -> None:
        if not self.path.exists():
            raise DataError(f"{self.path}: no such file of token sequences (working directory {Path.cwd()})")
        if not self.path.is_file():
            what = "a folder" if self.path.is_dir() else "a stream"
            raise DataError(f"{self.path}: needs a file, which is read twice, got {what}")
        refuse_lfs_pointer(self.path)

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        # Binary, because text mode would also split lines at U+2028 and report a bad byte without its line.
        try:
            with self.path.open("rb") as file:
                yield from ((number, raw) for number, raw in enumerate(file, start=1) if raw.strip())
        except OSError as e:
            raise DataError(f"{self.path}: cannot be read: {e.strerror}") from e

    def _batches(self) -> Iterator[list[tuple[int, bytes]]]:
        lines = self._raw_lines()
        while batch := list(islice(lines, LINES_PER_BATCH)):
            yield batch

    def _parse(self, number: int, raw: bytes) -> TokenSequence:
        where = f"{self.path}:{number}"
        try:
            fields = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
        except UnicodeDecodeError as e:
            raise DataError(f"{where}: not valid UTF-8 at byte {e.start}") from e
        except json.JSONDecodeError as e:
            raise DataError(f"{where}: not valid JSON at column {e.colno}: {e.msg}") from e
        except (ValueError, RecursionError) as e:  # numbers with thousands of digits, lists nested thousands deep
            raise DataError(f"{where}: not valid JSON: {e}") from e
        if not isinstance(fields, dict):
            raise DataError(f"{where}: needs a JSON object, got {type(fields).__name__}")
        if "token_ids" not in fields:
            has = short(list(fields))[1:-1] or "no keys"
            raise DataError(f"{where}: needs a list of integers under token_ids, the line has {has}")
        problem = self._find_problem(token_ids := fields.pop("token_ids"))
        if problem:
            raise DataError(f"{where}: {problem}")
        return TokenSequence(where=where, token_ids=np.array(token_ids, np.int32), other_keys=fields)

    def _find_problem(self, token_ids: Any) -> str | None:
        """Return what is wrong with the value of `token_ids`; None if it is valid."""
        if not isinstance(token_ids, list):
            return f"token_ids needs a list of integers, got {short(token_ids)}"
        if not token_ids:
            return "token_ids needs at least one token, got an empty list"
        # isinstance accepts true and false as ints
        if set(map(type, token_ids)) != {int}:
            at = next(i for i, token in enumerate(token_ids) if type(token) is not int)
            return f"token_ids[{at}] needs to be an integer, got {short(token_ids[at])}"
        if min(token_ids) < 0:
            at = next(i for i, token in enumerate(token_ids) if token < 0)
            return f"token_ids[{at}] needs to be at least 0, got {short(token_ids[at])}"
        if max(token_ids) >= self.vocab_size:
            at = next(i for i, token in enumerate(token_ids) if token >= self.vocab_size)
            limit = f"the model's vocab_size = {self.vocab_size}"
            return f"token_ids[{at}] needs to be below {limit}, got {short(token_ids[at])}"
        if len(token_ids) > self.max_positions:
            return (
                f"token_ids has {len(token_ids)} tokens, {len(token_ids) - self.max_positions} more than the model's "
                f"max_position_embeddings = {self.max_positions}"
            )
        return None


@contextmanager
def partial_file(path: Path, *, source: Path) -> Iterator[TextIO]:
    """Open `<path>.partial` for writing; rename it to `path` if the block succeeds, else remove it.

    Args:
        source: file that is read in the block.

    Raises:
        ConfigError: the output would overwrite `source` or something that is not a file, or it cannot be written.
    """
    draft = path.with_name(f"{path.name}.partial")
    for each in (path, draft):
        if each.exists() and source.exists() and each.samefile(source):
            raise ConfigError(f"{path}: cannot be the output, {each} is the input")
        if each.exists() and not each.is_file():
            raise ConfigError(f"{path}: cannot be the output, {each} is {'a folder' if each.is_dir() else 'a device'}")
    try:
        file = draft.open("w", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be the output, {draft} cannot be written: {e.strerror}") from e
    try:
        with file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _to_json_numbers(values: NDArray[np.float32]) -> Sequence[float]:
    """Round float32 values to nine digits, which identify each; most exact values have more than twenty."""
    return [float(f"{value:.9g}") for value in values.tolist()]
