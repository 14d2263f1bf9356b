"""Prompts in a file, of which a process holds 8 bytes each in memory."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Prompt
from megarl.errors import DataError


class StoredPrompts(Sequence[Prompt]):
    """A sequence of prompts that are read from a file at each access, in any order.

    The file has no name: no other process can read or change it, and it ends with the last reference to it. Changes of
    the data file have no effect on prompts that were stored.
    """

    def __init__(self, file: BinaryIO, starts_N: NDArray[np.int64], ends_N: NDArray[np.int64]) -> None:
        """`starts_N`, `ends_N`: offsets of each prompt in the file."""
        self._file, self._starts_N, self._ends_N = file, starts_N, ends_N

    @classmethod
    def store(cls, prompts: Iterable[Prompt], folder: Path | None = None) -> StoredPrompts:
        """Write the prompts to a new file.

        Args:
            folder: of the file; created if missing. None: the system's folder for temporary files.

        Raises:
            DataError: the file cannot be written.
        """
        ends = [0]
        with _named_errors(folder):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed with the last reference
        for prompt in prompts:
            stored = pickle.dumps(prompt, pickle.HIGHEST_PROTOCOL)
            with _named_errors(folder):
                ends.append(ends[-1] + file.write(stored))
        with _named_errors(folder):
            file.flush()
        bounds = np.array(ends, np.int64)
        return cls(file, bounds[:-1], bounds[1:])

    def __len__(self) -> int:
        return len(self._starts_N)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> StoredPrompts: ...

    def __getitem__(self, index: int | slice) -> Prompt | StoredPrompts:
        """Return one prompt, or those of a slice, which share the file."""
        if isinstance(index, slice):
            return StoredPrompts(self._file, self._starts_N[index], self._ends_N[index])
        start, end = int(self._starts_N[index]), int(self._ends_N[index])
        prompt: Prompt = pickle.loads(os.pread(self._file.fileno(), end - start, start))  # noqa: S301  # its own file
        return prompt


@contextmanager
def _named_errors(folder: Path | None) -> Iterator[None]:
    """Raise errors of the file as `DataError`s that name its folder."""
    try:
        yield
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise DataError(f"{where}: tokenized prompts cannot be stored: {error.strerror}") from error
