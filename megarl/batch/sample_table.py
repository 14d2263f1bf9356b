"""References to the samples of a step, as columns of numbers. Shapes: N samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megarl.batch.pack import ColumnName

SampleKey = tuple[int, int]
"""Identifies a trajectory of a step: (payload index, index within that payload)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """Reference to one trajectory, with the per-sequence values that the controller computed."""

    payload: int
    """Index into the `payloads` of the request."""
    index: int
    """Index of the trajectory within that payload."""
    num_tokens: int
    scalars: Mapping[ColumnName, float] = field(default_factory=dict)
    """Columns with one value for the whole sequence, such as its advantage."""

    @property
    def key(self) -> SampleKey:
        """The (payload, index) pair that identifies the trajectory within the step."""
        return self.payload, self.index


@dataclass(frozen=True, eq=False)
class SampleTable(Sequence[SampleRef]):
    """A sequence of `SampleRef`s in arrays: requests of 100,000 samples are split and sent without a loop over them."""

    keys_N2: NDArray[np.int64]
    """[N, 2]: payload and index of each sample."""
    num_tokens_N: NDArray[np.int64]
    """[N]"""
    scalars: Mapping[ColumnName, NDArray[np.float64]] = field(default_factory=dict)
    """Columns with one value for each sequence, [N] each."""

    @classmethod
    def of(cls, samples: Sequence[SampleRef]) -> SampleTable:
        """Return the table of these samples, all of which need the same scalars."""
        if isinstance(samples, SampleTable):
            return samples
        names = samples[0].scalars if samples else ()
        assert all(sample.scalars.keys() == samples[0].scalars.keys() for sample in samples), (
            "samples differ in columns"
        )
        return cls(
            np.array([sample.key for sample in samples], np.int64).reshape(-1, 2),
            np.array([sample.num_tokens for sample in samples], np.int64),
            {name: np.array([sample.scalars[name] for sample in samples], np.float64) for name in names},
        )

    def take(self, indices: NDArray[np.intp]) -> SampleTable:
        """Return the table of the samples at these indices."""
        return SampleTable(
            self.keys_N2[indices],
            self.num_tokens_N[indices],
            {name: values_N[indices] for name, values_N in self.scalars.items()},
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.num_tokens_N.sum())

    @property
    def payloads(self) -> list[int]:
        """Indices of the payloads that hold a sample, ascending."""
        found: list[int] = np.unique(self.keys_N2[:, 0]).tolist()
        return found

    def __len__(self) -> int:
        return len(self.num_tokens_N)

    @overload
    def __getitem__(self, index: int) -> SampleRef: ...

    @overload
    def __getitem__(self, index: slice) -> SampleTable: ...

    def __getitem__(self, index: int | slice) -> SampleRef | SampleTable:
        """Return one sample, or the table of a slice."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        payload, number = self.keys_N2[index].tolist()
        return SampleRef(
            payload=payload,
            index=number,
            num_tokens=int(self.num_tokens_N[index]),
            scalars={name: float(values_N[index]) for name, values_N in self.scalars.items()},
        )

    def __iter__(self) -> Iterator[SampleRef]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as other sequences that compare by value
