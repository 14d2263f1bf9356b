"""Records a model's `load_weights` and determines the source of every parameter element.

    load_weights(meta tensors under Hugging Face names)
        view, narrow, chunk, ...     a view shares storage, offset and strides: nothing to record
        copy_, fill_, cat, clone     record that a box of one storage has the values of a box of another
        anything else                record that the result is computed from the inputs

The recorded contents of storages are updated with every write: a later write replaces an earlier one, and values are
tracked through any number of intermediate tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from torch import FunctionSchema, Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.reshard.layout.layout import Box, extent, intersect


class Coverage:
    """A set of disjoint boxes of one tensor, efficient for thousands of boxes (experts stacked in one parameter)."""

    def __init__(self) -> None:
        self._boxes: list[Box] = []
        """Sorted boxes, hence sorted by first row."""
        self._max_rows = 0

    def overlapping(self, box: Box) -> list[Box]:
        """Return the boxes that share an element with `box`."""
        if not box:
            return list(self._boxes)
        first, last = box[0]
        at = bisect_left(self._boxes, ((first - self._max_rows + 1, 0),))
        found = []
        while at < len(self._boxes) and self._boxes[at][0][0] < last:
            if intersect(self._boxes[at], box) is not None:
                found.append(self._boxes[at])
            at += 1
        return found

    def add(self, box: Box) -> None:
        """Add a box that does not overlap the others."""
        insort(self._boxes, box)
        if box:
            self._max_rows = max(self._max_rows, box[0][1] - box[0][0])

    def remove(self, box: Box) -> None:
        """Remove one of the boxes."""
        del self._boxes[bisect_left(self._boxes, box)]

    def first_gap(self, box: Box) -> Box | None:
        """Return the first part of `box`, by rows, that is not covered; None if all of it is covered."""
        left = subtract(box, self.overlapping(box))
        return min(left) if left else None


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return `box` without `others`, as disjoint boxes."""
    left = [box]
    for other in others:
        left = [part for piece in left for part in _without(piece, other)]
    return left


def _without(box: Box, other: Box) -> Iterator[Box]:
    shared = intersect(box, other)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        # dimensions before `dim` are cut to the shared range, so that the parts are disjoint
        if start < first:
            yield (*shared[:dim], (start, first), *box[dim + 1 :])
        if last < stop:
            yield (*shared[:dim], (last, stop), *box[dim + 1 :])


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Source of a box's elements: a Hugging Face tensor (`tensor`), a constant (`value`), or else computed."""

    tensor: str | None = None
    offset: int = 0
    """Offset of the box's first element in the tensor, in elements."""
    strides: tuple[int, ...] = ()
    """Stride in the tensor for each dimension of the box, in elements."""
    value: float | None = None
    cause: str | None = None
    """For computed values: the Hugging Face tensor that was being loaded, or `AFTER_LAST_TENSOR`."""

    def part(self, box: Box, of: Box) -> ValueSource:
        """Return the source of `box` within box `of`, which has this source."""
        if self.tensor is None:
            return self
        skipped = sum((b[0] - o[0]) * s for b, o, s in zip(box, of, self.strides, strict=True))
        return replace(self, offset=self.offset + skipped)


AFTER_LAST_TENSOR = "<end>"
"""Cause of values that are computed after the last tensor was loaded."""

CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
"""Operations whose result depends only on the shapes of the inputs, and its value."""


class StorageContents:
    """Recorded contents of one storage, in coordinates of the contiguous tensor that it was allocated for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.covered = Coverage()
        self.sources: dict[Box, ValueSource] = {}

    def write(self, box: Box, source: ValueSource) -> None:
        """Record that `box` now has the values of `source`."""
        for old in self.covered.overlapping(box):
            before = self.sources.pop(old)
            self.covered.remove(old)
            for rest in subtract(old, [box]):
                self.covered.add(rest)
                self.sources[rest] = before.part(rest, old)
        self.covered.add(box)
        self.sources[box] = source


@dataclass(frozen=True, slots=True)
class BoxView:
    """A strided view as a box of the underlying contiguous tensor."""

    box: Box
    dims: tuple[int | None, ...]
    """Tensor dimension of each view dimension; None for view dimensions of length 1."""


def find_box(offset: int, lengths: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> BoxView | None:
    """Return the view's box in a contiguous tensor of `shape`; None if the view is no box."""
    if not 0 <= offset < prod(shape):
        return None
    full = contiguous_strides(shape)
    start = [int(at) for at in np.unravel_index(offset, shape)]
    box = [(s, s + 1) for s in start]
    dims: list[int | None] = []
    for length, stride in zip(lengths, strides, strict=True):
        if length == 1:
            dims.append(None)
            continue
        candidates = [i for i, s in enumerate(full) if s == stride and shape[i] > 1 and i not in dims]
        if not candidates:
            return None
        box[candidates[0]] = (start[candidates[0]], start[candidates[0]] + length)
        dims.append(candidates[0])
    fits = all(stop <= length for (_, stop), length in zip(box, shape, strict=True))
    return BoxView(tuple(box), tuple(dims)) if fits else None


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of that shape, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records this thread's operations on `sources` and `targets` in a `with` block."""

    def __init__(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Args:
        sources: Hugging Face name -> tensor on the meta device, contiguous.
        targets: the model's own tensors. Writes to them are recorded and not executed.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.derived: set[str] = set()
        """Causes of values that are computed from a target's contents."""
        self.targets: dict[str, StorageContents] = {}
        """Recorded contents of each target."""
        self._sources = {_storage(t): (name, tuple(t.shape)) for name, t in sources.items()}
        self._keep: list[Tensor] = [*sources.values(), *targets.values()]
        """Keeps storages alive, so that their addresses are not reused."""
        self._temporary: dict[int, StorageContents] = {}
        self._from_target: set[int] = set()
        self._cause = AFTER_LAST_TENSOR
        self._targets: dict[int, list[tuple[int, int, StorageContents]]] = {}
        """Storage -> (first offset, end offset, contents) of each target in it."""
        for name, t in targets.items():
            contents = self.targets[name] = StorageContents(tuple(t.shape))
            self._targets.setdefault(_storage(t), []).append((_offset(t), _offset(t) + t.numel(), contents))

    def feed(self, sources: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors for `load_weights`; computed values are attributed to the tensor yielded last."""
        for name, tensor in sources.items():
            self._cause = name
            yield name, tensor
        self._cause = AFTER_LAST_TENSOR

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable:
            return self._mutate(name, func, args, kwargs)
        inputs = _tensors((args, kwargs))
        if name == "_to_copy" and args[0].is_meta:
            kwargs = {**kwargs, "device": "meta"}  # a meta tensor cannot be copied to a real device
        out = func(*args, **kwargs)
        known = {_storage(t) for t in inputs}
        for result in _tensors(out):
            if _storage(result) not in known:
                self._keep.append(result)
                self._create(name, result, inputs, args, kwargs)
        return out

    def _mutate(self, name: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        written = _written(func._schema, args, kwargs)
        inputs = [t for t in _tensors((args, kwargs)) if not any(t is w for w in written)]
        writes_target = any(_storage(t) in self._targets for t in written)
        if writes_target or any(t.is_meta for t in inputs) != all(t.is_meta for t in written):
            out = written[0] if len(func._schema.returns) == 1 else None
        else:
            out = func(*args, **kwargs)
        if name == "copy_":
            self._copy(args[0], args[1])
        elif name == "zero_":
            self._write_all(args[0], ValueSource(value=0.0))
        elif name == "fill_" and isinstance(args[1], (int, float)):
            self._write_all(args[0], ValueSource(value=float(args[1])))
        else:
            for target in written:
                self._compute(target, inputs if name == "fill_" else [*inputs, target])
        return out

    def _create(
        self, name: str, out: Tensor, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._temporary[_storage(out)] = StorageContents(tuple(out.shape))
        if name in ("clone", "_to_copy", "contiguous"):
            self._copy(out, args[0])
        elif name == "cat":
            dim, at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)), 0
            for part in args[0]:
                self._copy(out.narrow(dim, at, part.shape[dim]), part)
                at += part.shape[dim]
        elif name in CONSTANTS:
            self._write_all(out, ValueSource(value=CONSTANTS[name]))
        elif inputs and "empty" not in name:
            self._compute(out, inputs)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if _place(source) == _place(target):
            return  # with one head per rank, DeepSeek's w_vc is a view of a parameter and is copied to itself
        if _storage(source) in self._targets or _storage(source) in self._from_target:
            self._compute(target, [source])
            return
        contents, there = self._locate(target)
        if contents is None or there is None:
            self._compute(target, [source])
            return
        source = source.expand(target.shape)
        strides = [0] * len(contents.shape)
        for dim, stride in zip(there.dims, source.stride(), strict=True):
            if dim is not None:
                strides[dim] = stride
        for box, value_source in self._pull(_storage(source), _offset(source), there.box, tuple(strides)):
            contents.write(box, value_source)

    def _pull(self, storage: int, offset: int, box: Box, strides: tuple[int, ...]) -> Iterator[tuple[Box, ValueSource]]:
        """Yield parts of `box` with the source of their values, which the storage holds at `offset` with `strides`."""
        if storage in self._sources:
            yield box, ValueSource(self._sources[storage][0], offset, strides)
            return
        contents = self._temporary.get(storage)
        there = find_box(offset, extent(box), strides, contents.shape) if contents is not None else None
        if contents is None or there is None:
            yield box, ValueSource(cause=self._cause)
            return
        for written in contents.covered.overlapping(there.box):
            shared = intersect(written, there.box)
            assert shared is not None
            part, steps = list(box), [0] * len(box)
            source = contents.sources[written].part(shared, written)
            for dim, runs in enumerate(there.dims):
                if runs is not None:
                    first = box[dim][0] + shared[runs][0] - there.box[runs][0]
                    part[dim] = (first, first + shared[runs][1] - shared[runs][0])
                    steps[dim] = source.strides[runs] if source.tensor else 0
            yield tuple(part), replace(source, strides=tuple(steps)) if source.tensor else source

    def _compute(self, target: Tensor, inputs: Iterable[Tensor]) -> None:
        if any(_storage(t) in self._targets or _storage(t) in self._from_target for t in inputs):
            self.derived.add(self._cause)
            self._from_target.add(_storage(target))
        self._write_all(target, ValueSource(cause=self._cause))

    def _write_all(self, target: Tensor, source: ValueSource) -> None:
        contents, there = self._locate(target)
        if contents is None:
            return
        if there is not None:
            contents.write(there.box, source)
        else:  # the position of a constant cannot be recorded
            contents.write(tuple((0, n) for n in contents.shape), ValueSource(cause=self._cause))

    def _locate(self, tensor: Tensor) -> tuple[StorageContents | None, BoxView | None]:
        """Return the contents that a write to `tensor` changes, None if it changes none, and which box of them."""
        storage = _storage(tensor)
        if storage in self._sources:  # a loader may write into what it was given (gpt-oss's biases)
            name, shape = self._sources.pop(storage)
            self._temporary[storage] = StorageContents(shape)
            everything = tuple((0, n) for n in shape)
            self._temporary[storage].write(everything, ValueSource(name, 0, contiguous_strides(shape)))
        base, found = 0, self._temporary.get(storage)
        for first, last, contents in self._targets.get(storage, ()):
            if first <= _offset(tensor) < last:
                base, found = first, contents
                break
        if found is None or tensor.numel() == 0:
            return None, None
        return found, find_box(_offset(tensor) - base, tuple(tensor.shape), tensor.stride(), found.shape)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _place(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return _storage(tensor), _offset(tensor), tuple(tensor.shape), tensor.stride()


def _written(schema: FunctionSchema, args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor]:
    marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    return _tensors([given[name] for name in marked if name in given])


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
