"""How one call crosses the controller/worker boundary, as pairs of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megarl.placement.rank_grid import RankGrid

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Transfer(Generic[A, R]):
    """Types the call: a method `(A) -> R` on every rank looks like one `(A) -> R` to the controller."""

    dispatch: Callable[[A, RankGrid], Sequence[A]]
    """One argument per rank."""

    collect: Callable[[Sequence[R], RankGrid], R]
    """One result from every rank's."""


def to_all(argument: A, grid: RankGrid) -> list[A]:
    """The same argument for every rank."""
    return [argument] * grid.size


def from_output(results: Sequence[R], grid: RankGrid) -> R:
    """The result of data-parallel replica 0's answering rank; workers have reduced over the replicas already."""
    return results[grid.output_rank(0)]


def from_first(results: Sequence[R], grid: RankGrid) -> R:
    """Rank 0's result."""
    return results[0]


BROADCAST: Transfer[Any, Any] = Transfer(to_all, from_first)
"""The same argument to every rank, rank 0's result back."""
