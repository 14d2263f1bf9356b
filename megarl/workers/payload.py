"""Handles on values that stay where they were produced until they are fetched.

The controller forwards payloads without fetching them: the values go from worker to worker through Ray's object
store, where NumPy arrays are read without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import ray

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Payload(Protocol[T_co]):
    """A handle on a value of type T."""

    def fetch(self) -> T_co:
        """Return the value itself."""
        ...


@dataclass(frozen=True, slots=True)
class StoredPayload(Generic[T]):
    """A value in Ray's object store."""

    ref: Any
    """The ray.ObjectRef of a T."""

    def fetch(self) -> T:
        """Return the value; NumPy arrays in it are read-only."""
        value: T = ray.get(self.ref)
        return value


@dataclass(frozen=True, slots=True)
class RemoteResults(Generic[T]):
    """The results of a call on several ranks, each stored on the node of the rank that produced it."""

    refs: tuple[Any, ...]
    """One ray.ObjectRef of a T per data-parallel replica."""

    def fetch(self) -> tuple[T, ...]:
        """Return the results by data-parallel replica; NumPy arrays in them are read-only."""
        return tuple(ray.get(list(self.refs)))


@dataclass(frozen=True, slots=True)
class LocalPayload(Generic[T]):
    """A value in this process, for stages that run without Ray and for tests."""

    value: T

    def fetch(self) -> T:
        """Return the value itself."""
        return self.value
