"""Values per token of a step, in the parts in which they were computed, and the parts that a replica needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.pack import PerToken
from megarl.batch.sample_table import SampleKey
from megarl.megatron.requests import TokenColumn, Trajectories
from megarl.workers.payload import LocalPayload, Payload, fetch_all


@dataclass(frozen=True, slots=True)
class ComputedColumn:
    """A column whose parts are stored where they were computed; satisfies `Payload[TokenColumn]`."""

    refs: tuple[Any, ...]
    """One ray.ObjectRef of a part, a mapping from sample keys to values, per replica that has computed one."""
    sorted_keys_N: NDArray[np.int64]
    """Keys of the N samples as single numbers, ascending."""
    parts_N: NDArray[np.int64]
    """Index in `refs` of the part that holds each of them."""

    @classmethod
    def of(cls, refs: Sequence[Any], keys: Sequence[NDArray[np.int64]]) -> ComputedColumn:
        """Return the column; `keys`: those of the samples of each part, [n, 2]."""
        keys_N = _as_numbers(np.concatenate(keys))
        parts_N = np.repeat(np.arange(len(keys)), [len(of_part) for of_part in keys])
        order_N = np.argsort(keys_N, kind="stable")
        return cls(tuple(refs), keys_N[order_N], parts_N[order_N])

    def select(self, keys_N2: NDArray[np.int64]) -> ComputedColumn:
        """Return the column with the parts only that hold a sample of these keys."""
        found_N = np.searchsorted(self.sorted_keys_N, np.unique(_as_numbers(keys_N2)))
        parts_P, parts_N = np.unique(self.parts_N[found_N], return_inverse=True)
        refs = tuple(self.refs[part] for part in parts_P.tolist())
        return ComputedColumn(refs, self.sorted_keys_N[found_N], parts_N)

    def find_parts(self, keys_N2: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index in `refs` of the part that holds each of these samples, [N]."""
        return self.parts_N[np.searchsorted(self.sorted_keys_N, _as_numbers(keys_N2))]

    def load(self, values: Sequence[dict[SampleKey, PerToken]]) -> TokenColumn:
        """Return the parts."""
        return tuple(values)

    def fetch(self) -> TokenColumn:
        """Return the parts; their arrays are read-only."""
        return fetch_all([self])[0]


def _as_numbers(keys_N2: NDArray[np.int64]) -> NDArray[np.int64]:
    numbers_N: NDArray[np.int64] = (keys_N2[:, 0] << 32) + keys_N2[:, 1]
    return numbers_N


def merge_column(parts: TokenColumn) -> dict[SampleKey, PerToken]:
    """Return the values of all parts by sample key."""
    merged: dict[SampleKey, PerToken] = {}
    for part in parts:
        merged.update(part)
    return merged


def select_values(column: Payload[TokenColumn], keys_N2: NDArray[np.int64]) -> Payload[TokenColumn]:
    """Return the part of a column that holds the values of these samples, as far as its storage allows."""
    if isinstance(column, ComputedColumn):
        return column.select(keys_N2)
    if isinstance(column, LocalPayload):
        keys = set(map(tuple, keys_N2.tolist()))
        parts = [{key: part[key] for key in keys & part.keys()} for part in column.value]
        return LocalPayload([part for part in parts if part])
    return column


def select_samples(payload: Payload[Trajectories], indices: NDArray[np.int64]) -> Payload[Trajectories]:
    """Return the trajectories of a payload at these indices, by index; a stored payload is fetched as a whole."""
    if isinstance(payload, LocalPayload):
        return LocalPayload({i: payload.value[i] for i in indices.tolist()})
    return payload
