"""Handles on values that stay where they were produced until they are fetched.

The controller forwards payloads without fetching them: the values go from worker to worker through Ray's object
store, where NumPy arrays are read without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Payload(Protocol[T_co]):
    """A handle on a value of type T."""

    @property
    def refs(self) -> tuple[Any, ...]:
        """References of the stored values that make up this one; empty if it is in this process."""
        ...

    def load(self, values: Sequence[Any]) -> T_co:
        """Return the value, given those of `refs`."""
        ...

    def fetch(self) -> T_co:
        """Return the value itself."""
        ...


@dataclass(frozen=True)  # without slots: pickled in C
class StoredPayload[T]:
    """A value in Ray's object store."""

    ref: Any
    """The ray.ObjectRef of a T."""

    @property
    def refs(self) -> tuple[Any, ...]:
        """The reference, as the only one."""
        return (self.ref,)

    def load(self, values: Sequence[T]) -> T:
        """Return the only value."""
        return values[0]

    def fetch(self) -> T:
        """Return the value; NumPy arrays in it are read-only."""
        return fetch_all([self])[0]


@dataclass(frozen=True)  # without slots: pickled in C
class StoredItem[T]:
    """An item of a sequence in Ray's object store: small values that were produced together share an object."""

    ref: Any
    """The ray.ObjectRef of a sequence of T."""
    index: int

    @property
    def refs(self) -> tuple[Any, ...]:
        """The reference to the sequence."""
        return (self.ref,)

    def load(self, values: Sequence[Sequence[T]]) -> T:
        """Return the item of the only value."""
        return values[0][self.index]

    def fetch(self) -> T:
        """Return the item; NumPy arrays in it are read-only."""
        return fetch_all([self])[0]


@dataclass(frozen=True, slots=True)
class RemoteResults[T]:
    """The results of a call on several ranks, each stored on the node of the rank that produced it."""

    refs: tuple[Any, ...]
    """One ray.ObjectRef of a T per data-parallel replica."""

    def load(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return the results by data-parallel replica."""
        return tuple(values)

    def fetch(self) -> tuple[T, ...]:
        """Return the results by data-parallel replica; NumPy arrays in them are read-only."""
        return fetch_all([self])[0]


@dataclass(frozen=True, slots=True)
class LocalPayload[T]:
    """A value in this process, for stages that run without Ray and for tests."""

    value: T

    @property
    def refs(self) -> tuple[Any, ...]:
        """Nothing: the value is here."""
        return ()

    def load(self, values: Sequence[Any]) -> T:
        """Return the value itself."""
        return self.value

    def fetch(self) -> T:
        """Return the value itself."""
        return self.value


def fetch_all[T](payloads: Iterable[Payload[T]]) -> list[T]:
    """Return the values of the payloads, all fetched in one call, and an object of several payloads once.

    NumPy arrays in them are read-only.
    """
    payloads = list(payloads)
    refs = list(dict.fromkeys(ref for payload in payloads for ref in payload.refs))
    values = dict(zip(refs, _get(refs), strict=True)) if refs else {}
    return [payload.load([values[ref] for ref in payload.refs]) for payload in payloads]


def distinct_refs[T](items: Sequence[StoredItem[T]]) -> tuple[list[Any], tuple[tuple[int, int], ...]]:
    """Return the references to the objects of the items, and the position of each item: (reference, index)."""
    positions: dict[Any, int] = {}
    places = [(positions.setdefault(item.ref, len(positions)), item.index) for item in items]
    return list(positions), tuple(places)  # a tuple: Ray pickles each item of a list by itself


MAX_ARGUMENTS = 64
"""Largest number of stored values that are arguments of one call. Ray fetches those below 100 kB to the caller, and
sends them by value, all of them in one message, of at most 512 MiB."""


@dataclass(frozen=True, slots=True)
class UnfetchedArguments:
    """References to the arguments of a call, whose receiver fetches the values."""

    refs: tuple[Any, ...]


def as_arguments(refs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with which a call gets the values of stored objects, however many, by `fetch_arguments`."""
    return tuple(refs) if len(refs) <= MAX_ARGUMENTS else (UnfetchedArguments(tuple(refs)),)


def fetch_arguments(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the values of stored objects, given what has become of `as_arguments`; blocks until they are here."""
    match arguments:
        case [UnfetchedArguments(refs=refs)]:
            return _get(list(refs))
        case _:
            return arguments  # Ray has replaced the references


def _get(refs: list[Any]) -> list[Any]:
    import ray  # a trainer rank whose values are all local needs no Ray

    values: list[Any] = ray.get(refs)
    return values
