"""Files of token sequences, one JSON object a line, and files of their scores.

    {"id": "a", "token_ids": [5, 9, 2]}  ->  {"id": "a", "logprobs": [-1.25, -0.5], "entropy": [2.0, 1.5]}

Files may be longer than memory: what is read is forgotten once it is scored.
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

from megarl.data.progress_bar import track
from megarl.errors import ConfigError, DataError

PROBLEMS_SHOWN = 20
"""Bad lines that an error names; the others are counted."""

LINES_PER_BATCH = 1024
"""Lines between two updates of the progress bar while a file is checked."""

COMPUTED = ("logprobs", "entropy")
"""Keys of a line of scores that do not come from the line of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """One sequence of T tokens."""

    where: str
    """`<path>:<line>`, to open an error message with."""

    token_ids: NDArray[np.int32]
    """[T], T >= 1."""

    rest: dict[str, Any]
    """The line's other keys."""

    def with_scores(self, logprobs: NDArray[np.float32], entropy: NDArray[np.float32]) -> str:
        """The line of scores, without its end: what came with the tokens, and [T - 1] of each.

        Raises:
            DataError: a score is not finite, which JSON cannot say.
        """
        for name, values in zip(COMPUTED, (logprobs, entropy), strict=True):
            assert len(values) == len(self.token_ids) - 1, f"{self.where}: {len(values)} {name}"
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                raise DataError(f"{self.where}: the model needs to give a finite {name}[{at}], got {values[at]}")
        rest = {key: value for key, value in self.rest.items() if key not in COMPUTED}
        scores = {"logprobs": _numbers(logprobs), "entropy": _numbers(entropy)}
        return json.dumps(rest | scores, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """How much there is to score."""

    num_lines: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Token sequences for one model. Blank lines are skipped; keys other than `token_ids` are kept."""

    path: Path
    vocab_size: int
    max_positions: int

    def check(self) -> TokenCount:
        """Read the whole file.

        Raises:
            DataError: there is no such file, it holds no sequence, or some are bad: names the first `PROBLEMS_SHOWN`.
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
                    if num_problems <= PROBLEMS_SHOWN:
                        problems.append(str(e))
            num_lines += len(batch)
        if not num_lines:
            raise DataError(f"{self.path}: the file holds no token sequences")
        if num_problems > PROBLEMS_SHOWN:
            problems.append(f"{self.path}: {num_problems - PROBLEMS_SHOWN} more bad lines, {num_problems} together")
        if problems:
            raise DataError("\n".join(problems))
        return TokenCount(num_lines=num_lines, num_tokens=num_tokens)

    def chunks(self, *, max_tokens: int, max_lines: int) -> Iterator[list[TokenLine]]:
        """The sequences in order, in lists of at most so many tokens and lines; a longer sequence stands alone.

        Raises:
            DataError: a line is bad.
        """
        chunk: list[TokenLine] = []
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

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        # Binary, because text mode would also end lines at U+2028 and report a bad byte without its line.
        try:
            with self.path.open("rb") as file:
                yield from ((number, raw) for number, raw in enumerate(file, start=1) if raw.strip())
        except OSError as e:
            raise DataError(f"{self.path}: cannot be read: {e.strerror}") from e

    def _batches(self) -> Iterator[list[tuple[int, bytes]]]:
        lines = self._raw_lines()
        while batch := list(islice(lines, LINES_PER_BATCH)):
            yield batch

    def _parse(self, number: int, raw: bytes) -> TokenLine:
        where = f"{self.path}:{number}"
        try:
            fields = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
        except UnicodeDecodeError as e:
            raise DataError(f"{where}: not valid UTF-8 at byte {e.start}") from e
        except json.JSONDecodeError as e:
            raise DataError(f"{where}: not valid JSON at column {e.colno}: {e.msg}") from e
        except (ValueError, RecursionError) as e:  # numbers of thousands of digits, lists a thousand deep
            raise DataError(f"{where}: not valid JSON: {e}") from e
        if not isinstance(fields, dict):
            raise DataError(f"{where}: needs a JSON object, got {type(fields).__name__}")
        if "token_ids" not in fields:
            has = short(list(fields))[1:-1] or "no keys"
            raise DataError(f"{where}: needs a list of integers under token_ids, the line has {has}")
        problem = self._problem(token_ids := fields.pop("token_ids"))
        if problem:
            raise DataError(f"{where}: {problem}")
        return TokenLine(where=where, token_ids=np.array(token_ids, np.int32), rest=fields)

    def _problem(self, token_ids: Any) -> str | None:
        """What is wrong with what stands under `token_ids`."""
        if not isinstance(token_ids, list):
            return f"token_ids needs a list of integers, got {short(token_ids)}"
        if not token_ids:
            return "token_ids needs at least one token, got an empty list"
        # true and false are ints to isinstance
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
    """A new `<path>.partial` to write to: it becomes `path` when the block ends well, and is removed when it does not.

    Args:
        source: a file that is read meanwhile.

    Raises:
        ConfigError: it would overwrite `source` or something that is no file, or it cannot be written.
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


def _numbers(values: NDArray[np.float32]) -> Sequence[float]:
    """Nine digits tell every float32 from its neighbours; the exact value of most takes more than twenty."""
    return [float(f"{value:.9g}") for value in values.tolist()]
