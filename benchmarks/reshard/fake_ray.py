"""Ray's calls, answered in this process: values are serialized as Ray does, and bytes and calls are counted.

with FakeRay(answer).installed() as fake:
ref = fake.actor("rank 0").invoke.remote(call, None)  # as a handle of a Ray actor
ray.get(ref)                                        # what `answer` has returned, deserialized
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
from ray import cloudpickle


@dataclass(frozen=True, slots=True)
class Serialized:
    """A value as Ray sends it: cloudpickle's protocol 5, with arrays in separate buffers."""

    data: bytes
    buffers: tuple[bytes, ...]

    @classmethod
    def of(cls, value: object) -> Serialized:
        """Serialize `value` with cloudpickle."""
        found: list[Any] = []
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=found.append)
        return cls(data, tuple(bytes(buffer.raw()) for buffer in found))

    @property
    def num_bytes(self) -> int:
        """Size of the pickle and its buffers in bytes."""
        return len(self.data) + sum(map(len, self.buffers))

    def load(self) -> Any:
        """Return a new copy of the value."""
        return cloudpickle.loads(self.data, buffers=self.buffers)


class FakeRef(int):
    """A reference to a stored value, its number; hashed in C, as references of Ray are."""

    __slots__ = ()


@dataclass
class FakeRay:
    """The object store and the actors of a cluster."""

    answer: Callable[[str, str, tuple[object, ...]], Serialized]
    """Returns the result of a method call: (name of the actor, method, arguments) -> result."""
    num_calls: int = 0
    """Calls of actors and of `ray.put`."""
    fan_outs: list[str] = field(default_factory=list)
    """The first method of each series of calls that were begun before any of them was waited for."""
    sent: dict[tuple[str, str], tuple[object, ...]] = field(default_factory=dict)
    """The arguments of the last call of each method, by (name of the actor, method)."""
    sent_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    """The size of these arguments, and of the stored values that they refer to."""
    answer_seconds: float = 0.0
    """CPU seconds of `answer`, which are not the caller's."""
    _has_waited: bool = True
    _stored: dict[FakeRef, Serialized] = field(default_factory=dict)

    def actor(self, name: str) -> Any:
        """Return a handle of an actor, whose `invoke` can be called."""
        return SimpleNamespace(invoke=_Method(self, name))

    @contextmanager
    def installed(self) -> Iterator[FakeRay]:
        """Replace `ray.put`, `ray.get` and `ray.wait` inside the block."""
        with patch.object(ray, "put", self.put), patch.object(ray, "get", self.get):  # noqa: SIM117
            with patch.object(ray, "wait", self.wait):
                yield self

    def put(self, value: object) -> FakeRef:
        """Store a value and return its reference, as `ray.put`."""
        self.num_calls += 1
        return self._store(Serialized.of(value))

    def get(self, refs: FakeRef | Sequence[FakeRef]) -> Any:
        """Return the value of a reference, or those of several."""
        return self._stored[refs].load() if isinstance(refs, FakeRef) else [self._stored[ref].load() for ref in refs]

    def wait(
        self, refs: Sequence[FakeRef], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[FakeRef], list[FakeRef]]:
        """Return the references, all of which are ready, and those beyond `num_returns`."""
        self._has_waited = True
        return list(refs[:num_returns]), list(refs[num_returns:])

    def stored_bytes(self, ref: FakeRef) -> int:
        """Return the size of a stored value in bytes."""
        return self._stored[ref].num_bytes

    def call(self, actor: str, method: str, arguments: tuple[object, ...]) -> FakeRef:
        """Call a method of an actor."""
        self.num_calls += 1
        if self._has_waited:
            self.fan_outs.append(method)
            self._has_waited = False
        self.sent[actor, method] = arguments
        self.sent_bytes[actor, method] = Serialized.of(arguments).num_bytes
        began = time.process_time()
        result = self.answer(actor, method, arguments)
        self.answer_seconds += time.process_time() - began
        return self._store(result)

    def _store(self, value: Serialized) -> FakeRef:
        ref = FakeRef(len(self._stored))
        self._stored[ref] = value
        return ref


HANDLE_BYTES = 400
"""Size of a serialized actor handle."""


def _unusable(actor: str, _: bytes) -> str:
    return actor


@dataclass(frozen=True, slots=True)
class _Method:
    """`invoke` of a worker's actor, which takes the name of the method that it calls."""

    ray: FakeRay
    actor: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as little as a handle of a real actor: a few hundred bytes, which cannot be used here."""
        return _unusable, (self.actor, b"-" * HANDLE_BYTES)

    def remote(self, *arguments: Any) -> FakeRef:
        """Call the worker's method, of an engine by its name, of a trainer rank by what `pack_call` returns."""
        is_rank = self.actor.startswith("rank")
        method = json.loads(arguments[0])[1] if is_rank else arguments[0]
        return self.ray.call(self.actor, method, arguments)
