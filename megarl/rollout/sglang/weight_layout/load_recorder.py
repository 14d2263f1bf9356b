"""Watches a model load its weights, and knows where the value of every element came from.

    load_weights(meta tensors under Hugging Face names)
        view, narrow, chunk, ...     a view keeps its storage, offset and strides: nothing to note
        copy_, fill_, cat, clone     a box of one storage takes the values of a box of another: noted
        anything else                the result is computed, from whatever went in: noted as such

What storages hold is kept up to date write by write, so that a later write hides an earlier one and a value is followed
through any number of intermediate tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.reshard.layout.layout import Box, extent, intersect
from megarl.rollout.sglang.weight_layout.coverage import Coverage, subtract


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the elements of a box come from: those of a Hugging Face tensor, or else a constant, or else computed."""

    tensor: str | None = None
    offset: int = 0
    """Of the box's first element, in the tensor."""
    strides: tuple[int, ...] = ()
    """In the tensor, per dimension of the box."""
    value: float | None = None
    cause: str | None = None
    """For what is computed: the Hugging Face tensor that was being loaded; `END` after the last."""

    def part(self, box: Box, of: Box) -> Origin:
        """The origin of a box within `of`, whose origin this is."""
        if self.tensor is None:
            return self
        skipped = sum((b[0] - o[0]) * s for b, o, s in zip(box, of, self.strides, strict=True))
        return replace(self, offset=self.offset + skipped)


END = "<end>"

CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
"""Operations whose result depends on the shape of what goes in, not on its values."""


class Memory:
    """What one storage holds, in coordinates of the contiguous tensor that it was made for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.covered = Coverage()
        self.origins: dict[Box, Origin] = {}

    def write(self, box: Box, origin: Origin) -> None:
        """Elements of `box` come from `origin` from now on."""
        for old in self.covered.meeting(box):
            before = self.origins.pop(old)
            self.covered.remove(old)
            for rest in subtract(old, [box]):
                self.covered.add(rest)
                self.origins[rest] = before.part(rest, old)
        self.covered.add(box)
        self.origins[box] = origin


@dataclass(frozen=True, slots=True)
class Located:
    """A strided view as a box of the contiguous tensor behind it."""

    box: Box
    dims: tuple[int | None, ...]
    """The tensor's dimension that each of the view's runs along; None for those of length 1."""


def locate(offset: int, lengths: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> Located | None:
    """Where a view lies in a contiguous tensor of `shape`; None where it is no box of it."""
    full = contiguous_strides(shape)
    if offset < 0 or 0 in shape:
        return None
    start, rest = [], offset
    for length, stride in zip(shape, full, strict=True):
        at = min(rest // stride, max(0, length - 1))
        start.append(at)
        rest -= at * stride
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
    fits = rest == 0 and all(stop <= length for (_, stop), length in zip(box, shape, strict=True))
    return Located(tuple(box), tuple(dims)) if fits else None


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor of that shape, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Between `with recorder:` and its end, follows every operation of this thread on `sources` and `targets`."""

    def __init__(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Args:
        sources: Hugging Face name -> tensor on the meta device, contiguous.
        targets: the model's own tensors. They are not written: their writes are noted and left out.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.derived: set[str] = set()
        """Causes of values that are computed from a target."""
        self.targets: dict[str, Memory] = {name: Memory(tuple(t.shape)) for name, t in targets.items()}
        """What each target holds."""
        self._sources = {_storage(t): (name, tuple(t.shape)) for name, t in sources.items()}
        self._keep: list[Tensor] = [*sources.values(), *targets.values()]
        """Keeps storages, hence their addresses, from being used again."""
        self._temporary: dict[int, Memory] = {}
        self._from_target: set[int] = set()
        self._cause = END
        self._targets: dict[int, list[tuple[int, int, Memory]]] = {}
        """Storage -> first and last offset of the targets in it, and what they hold."""
        for name, t in targets.items():
            within = (_offset(t), _offset(t) + t.numel(), self.targets[name])
            self._targets.setdefault(_storage(t), []).append(within)

    def feed(self, sources: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The iterator for `load_weights`; what is computed until the next is taken is put down to the tensor."""
        for name, tensor in sources.items():
            self._cause = name
            yield name, tensor
        self._cause = END

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable:
            return self._mutate(name, func, args, kwargs)
        inputs = list(_tensors((*args, *kwargs.values())))
        if name == "_to_copy" and args[0].is_meta:
            kwargs = {**kwargs, "device": "meta"}  # to a real device there would be nothing to copy
        out = func(*args, **kwargs)
        known = {_storage(t) for t in inputs}
        for result in _tensors((out,)):
            if _storage(result) not in known:
                self._keep.append(result)
                self._create(name, result, inputs, args, kwargs)
        return out

    def _mutate(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        written = _written(func._schema, args, kwargs)
        inputs = [t for t in _tensors((*args, *kwargs.values())) if not any(t is w for w in written)]
        ours = any(_storage(t) in self._targets for t in written)
        if ours or any(t.is_meta for t in inputs) != all(t.is_meta for t in written):
            out = written[0] if len(func._schema.returns) == 1 else None
        else:
            out = func(*args, **kwargs)
        if name == "copy_":
            self._copy(args[0], args[1])
        elif name in ("fill_", "zero_"):
            self._fill(args[0], 0.0 if name == "zero_" else args[1], inputs)
        else:
            for target in written:
                self._compute(target, [*inputs, target])
        return out

    def _create(self, name: str, out: Tensor, inputs: list[Tensor], args: Any, kwargs: Any) -> None:
        self._temporary[_storage(out)] = Memory(tuple(out.shape))
        if name in ("clone", "_to_copy", "contiguous"):
            self._copy(out, args[0])
        elif name == "cat":
            dim, at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)), 0
            for part in args[0]:
                self._copy(out.narrow(dim, at, part.shape[dim]), part)
                at += part.shape[dim]
        elif name in CONSTANTS:
            self._write_all(out, Origin(value=CONSTANTS[name]))
        elif inputs and "empty" not in name:
            self._compute(out, inputs)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if _place(source) == _place(target):
            return  # DeepSeek's w_vc is a view of a parameter where a rank has one head, and is copied to itself
        if _storage(source) in self._targets or _storage(source) in self._from_target:
            self._compute(target, [source])
            return
        memory, base = self._memory(target)
        if memory is None or target.numel() == 0:
            return
        there = locate(_offset(target) - base, tuple(target.shape), target.stride(), memory.shape)
        if there is None:
            self._compute(target, [source])
            return
        source = source.expand(target.shape)
        strides = [0] * len(memory.shape)
        for dim, stride in zip(there.dims, source.stride(), strict=True):
            if dim is not None:
                strides[dim] = stride
        for box, origin in self._pull(_storage(source), _offset(source), there.box, tuple(strides)):
            memory.write(box, origin)

    def _pull(self, storage: int, offset: int, box: Box, strides: tuple[int, ...]) -> Iterator[tuple[Box, Origin]]:
        """Parts of `box`, each with the origin of the values that lie in the storage at offset and strides."""
        if storage in self._sources:
            yield box, Origin(self._sources[storage][0], offset, strides)
            return
        memory = self._temporary.get(storage)
        there = locate(offset, extent(box), strides, memory.shape) if memory is not None else None
        if memory is None or there is None:
            yield box, Origin(cause=self._cause)
            return
        for written in memory.covered.meeting(there.box):
            shared = intersect(written, there.box)
            assert shared is not None
            part, steps = list(box), [0] * len(box)
            origin = memory.origins[written].part(shared, written)
            for dim, runs in enumerate(there.dims):
                if runs is not None:
                    first = box[dim][0] + shared[runs][0] - there.box[runs][0]
                    part[dim] = (first, first + shared[runs][1] - shared[runs][0])
                    steps[dim] = origin.strides[runs] if origin.tensor else 0
            yield tuple(part), replace(origin, strides=tuple(steps)) if origin.tensor else origin

    def _fill(self, target: Tensor, value: Any, inputs: list[Tensor]) -> None:
        if inputs or not isinstance(value, (int, float)):
            self._compute(target, inputs)
        else:
            self._write_all(target, Origin(value=float(value)))

    def _compute(self, target: Tensor, inputs: Iterable[Tensor]) -> None:
        if any(_storage(t) in self._targets or _storage(t) in self._from_target for t in inputs):
            self.derived.add(self._cause)
            self._from_target.add(_storage(target))
        self._write_all(target, Origin(cause=self._cause))

    def _write_all(self, target: Tensor, origin: Origin) -> None:
        memory, base = self._memory(target)
        if memory is None or target.numel() == 0:
            return
        there = locate(_offset(target) - base, tuple(target.shape), target.stride(), memory.shape)
        everything = tuple((0, n) for n in memory.shape)
        if there is None:  # no box of it: for a constant as good as unknown
            origin = Origin(cause=self._cause)
        memory.write(there.box if there else everything, origin)

    def _memory(self, tensor: Tensor) -> tuple[Memory | None, int]:
        storage = _storage(tensor)
        for first, last, memory in self._targets.get(storage, ()):
            if first <= _offset(tensor) < last:
                return memory, first
        return self._temporary.get(storage), 0


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _place(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return _storage(tensor), _offset(tensor), tuple(tensor.shape), tensor.stride()


def _written(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    return list(_tensors(given[name] for name in marked if name in given))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
