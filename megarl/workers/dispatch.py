"""How a call on a worker group distributes its argument over the ranks and collects their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.placement.rank_grid import RankGrid


@dataclass(frozen=True, slots=True)
class Dispatch[A, R]:
    """A pair of functions that make a method `(A) -> R` of every rank look like one `(A) -> R` to the caller."""

    distribute: Callable[[A, RankGrid], Sequence[A]]
    """Returns one argument per rank, in rank order."""

    collect: Callable[[Sequence[R], RankGrid], R]
    """Combines the results of all ranks, in rank order, into one."""

    equal_work: bool = False
    """Whether all ranks of a pipeline stage do the same amount of work in the call. Stragglers are sought in such calls
    only: in others, such as a weight push, one rank may do most of the work by design."""

    by_reference: bool = False
    """Whether the arguments are large: each is stored once for all ranks that `distribute` gives the same object, and
    these ranks are sent a reference."""

    prepare: Callable[[A], A] | None = None
    """With `by_reference`: a module-level function that the first of several ranks of a relay with the same argument
    applies to it; what it returns is stored and sent to all of them. It may fetch what the argument refers to, and a
    rank that gets the argument itself has to do as much. None: nothing."""


def to_all[A](argument: A, grid: RankGrid) -> list[A]:
    """Return the same argument for every rank."""
    return [argument] * grid.size


def from_output_rank[R](results: Sequence[R], grid: RankGrid) -> R:
    """Return the result of the output rank of data-parallel replica 0; workers have reduced it over replicas."""
    return results[grid.output_rank(0)]


def from_rank0[R](results: Sequence[R], grid: RankGrid) -> R:
    """Return the result of rank 0."""
    return results[0]


BROADCAST: Dispatch[Any, Any] = Dispatch(to_all, from_rank0)
"""Sends the same argument to every rank and returns the result of rank 0."""
