"""The tensors of a model, which all weight layouts of the model share: names, shapes and dtypes.

A large model has tens of thousands of tensors, and each of thousands of ranks describes them to all others. So names
and specs are pickled compressed and once per message, decoded when they are first used, and compared by their digests.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from megarl.model_files.file_plan import Box
from megarl.model_files.header import itemsize

COMPRESSION_LEVEL = 1
"""Zlib's fastest level: higher ones save little, because names and boxes repeat themselves."""

DIGEST_BYTES = 16
"""Size of the digests that layouts are compared by."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One Hugging Face tensor of the model."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the dtype, such as `float32`."""

    @property
    def box(self) -> Box:
        """The box of the full tensor."""
        return tuple((0, n) for n in self.shape)


class Digested(ABC):
    """An object that is equal to those of its class with an equal digest."""

    @property
    @abstractmethod
    def digest(self) -> bytes:
        """A digest that is equal in all processes for equal objects."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return super().__eq__(other)
        return self is other or self.digest == other.digest

    def __hash__(self) -> int:  # the same in all processes
        return int.from_bytes(self.digest[:8], "little") >> 1


class Names(Digested):
    """Names in order; none contains a line break."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)

    @cached_property
    def strings(self) -> tuple[str, ...]:
        """The names as a tuple."""
        return tuple(zlib.decompress(self._encoded).decode().split("\n")) if self._encoded else ()

    @cached_property
    def number(self) -> Mapping[str, int]:
        """Name -> its index."""
        return {name: i for i, name in enumerate(self.strings)}

    @cached_property
    def digest(self) -> bytes:
        """A digest that is equal in all processes for equal names in equal order."""
        return digest_of([f"{len(self)}\n".encode(), "\n".join(self.strings).encode()])

    @cached_property
    def _encoded(self) -> bytes:
        return zlib.compress("\n".join(self.strings).encode(), COMPRESSION_LEVEL) if self.strings else b""

    def __len__(self) -> int:
        return len(self.strings)

    def __getitem__(self, index: int) -> str:
        return self.strings[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.strings)

    def __getstate__(self) -> dict[str, bytes]:
        return {"_encoded": self._encoded, "digest": self.digest}


class ModelTensors(Digested, Mapping[str, TensorSpec]):
    """Every Hugging Face tensor of a model in order: name -> spec."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.names = Names(specs)
        kinds: dict[TensorSpec, int] = {}
        kind_of = np.array([kinds.setdefault(spec, len(kinds)) for spec in specs.values()], np.int32)
        self._kinds = tuple(kinds), kind_of

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> ModelTensors:
        """Return `specs` itself if it is of this class."""
        return specs if isinstance(specs, cls) else cls(specs)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The specs in the order of the names; equal ones are one object."""
        kinds, kind_of = self._kinds
        return tuple([kinds[kind] for kind in kind_of.tolist()])

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        kinds, kind_of = self._kinds
        sizes = np.array([math.prod(spec.shape) * itemsize(spec.dtype) for spec in kinds], np.int64)
        return int(sizes[kind_of].sum())

    @cached_property
    def digest(self) -> bytes:
        """A digest that is equal in all processes for equal tensors in equal order."""
        return digest_of([self.names.digest, self._serialized])

    @cached_property
    def _kinds(self) -> tuple[tuple[TensorSpec, ...], NDArray[np.int32]]:
        """The distinct specs, and by tensor the index of its spec."""
        kinds, _, kind_of = zlib.decompress(self._encoded).partition(b"\n")
        specs = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in json.loads(kinds))
        return specs, np.frombuffer(kind_of, np.int32)

    @property
    def _serialized(self) -> bytes:
        kinds, kind_of = self._kinds
        return json.dumps([[spec.shape, spec.dtype] for spec in kinds]).encode() + b"\n" + kind_of.tobytes()

    @cached_property
    def _encoded(self) -> bytes:
        return zlib.compress(self._serialized, COMPRESSION_LEVEL)

    def __getitem__(self, name: str) -> TensorSpec:
        return self.specs[self.names.number[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names.strings)

    def __len__(self) -> int:
        return len(self._kinds[1])

    def __getstate__(self) -> dict[str, object]:
        return {"names": self.names, "_encoded": self._encoded, "digest": self.digest}


@lru_cache(maxsize=8)
def numbers_among(names: Names, others: Names) -> NDArray[np.int64]:
    """Return, by name, its index among others; -1: it is none of them."""
    return np.array([others.number.get(name, -1) for name in names], np.int64)


def digest_of(parts: Iterable[bytes]) -> bytes:
    """Return a digest of `DIGEST_BYTES` bytes of the parts, one after another."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
