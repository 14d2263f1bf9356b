"""Assignment of tensors to the safetensors files of a model folder, with offsets, before anything is written.

A tensor is stored in row-major order, so that a box of it consists of runs of bytes, (offset, length):

tensor [3, 8], box ((1, 3), (2, 6))      runs (10, 4), (18, 4)

. . . . . . . .
. . x x x x . .
. . x x x x . .
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from megarl.model_files.header import StoredTensor, encode_header, itemsize

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension."""


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of the box."""
    return tuple(stop - start for start, stop in box)


def contiguous_runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield first element and length, in elements, of each contiguous run of `box` in a row-major tensor of `shape`."""
    lengths = extent(box)
    if not all(lengths):
        return
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    partial = [dim for dim, n in enumerate(shape) if lengths[dim] < n]
    last = partial[-1] if partial else 0  # the box covers every later dimension completely
    first = sum(box[dim][0] * strides[dim] for dim in range(last, len(shape)))
    outer = [range(box[dim][0] * strides[dim], box[dim][1] * strides[dim], strides[dim]) for dim in range(last)]
    for start in product(*outer):
        yield first + sum(start), prod(lengths[last:])


def split_box(box: Box, limit: int) -> Iterator[Box]:
    """Split `box` into boxes of at most `limit` elements, in row-major order."""
    lengths = extent(box)
    if prod(lengths) <= limit:
        yield box
        return
    dim = next(dim for dim, n in enumerate(lengths) if n > 1)
    start, stop = box[dim]
    step = max(1, limit // prod(lengths[dim + 1 :]))
    for low in range(start, stop, step):
        yield from split_box((*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :]), limit)


def relative_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor that holds `outer`, which contains it."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))


TensorSpecs = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor name -> shape and dtype name in torch, such as `float32`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A safetensors file to write."""

    name: str
    """File name in the folder once the file is complete."""
    header: bytes
    """Header bytes, length prefix included."""
    tensors: Mapping[str, StoredTensor]
    """Tensor name -> dtype, shape and offset."""

    @property
    def num_bytes(self) -> int:
        """Size of the complete file in bytes."""
        return len(self.header) + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(stored.num_bytes for stored in self.tensors.values())

    @property
    def partial_name(self) -> str:
        """File name in the folder until the file is complete."""
        return f".{self.name}.partial"


def plan_files(folder: Path, groups: Sequence[TensorSpecs], max_bytes: int) -> tuple[PlannedFile, ...]:
    """Plan the files of `folder`: one file if all tensors fit, else each file holds tensors of one group only.

    Args:
        groups: tensors by name, shape and dtype.
        max_bytes: maximum total tensor size of a file; a larger tensor gets a separate file.
    """
    every = {name: tensor for group in groups for name, tensor in group.items()}
    if sum(map(_num_bytes, every.values())) <= max_bytes:
        contents: list[TensorSpecs] = [every]
    else:
        contents = [content for group in groups for content in _split_by_size(group, max_bytes)]
    count = len(contents)
    return tuple(_plan_file(folder, content, number, count) for number, content in enumerate(contents, start=1))


def _plan_file(folder: Path, tensors: TensorSpecs, number: int, count: int) -> PlannedFile:
    name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
    header, stored = encode_header(tensors, folder / name)
    return PlannedFile(name=name, header=header, tensors=stored)


def _split_by_size(tensors: TensorSpecs, max_bytes: int) -> Iterator[TensorSpecs]:
    content: dict[str, tuple[tuple[int, ...], str]] = {}
    total = 0
    for name, tensor in tensors.items():
        num_bytes = _num_bytes(tensor)
        if content and total + num_bytes > max_bytes:
            yield content
            content, total = {}, 0
        content[name] = tensor
        total += num_bytes
    if content:
        yield content


def _num_bytes(tensor: tuple[tuple[int, ...], str]) -> int:
    return prod(tensor[0]) * itemsize(tensor[1])


def assign_files(files: Sequence[PlannedFile], held: Sequence[Mapping[str, int]]) -> list[int]:
    """Return the writing process of each file: the one that holds most of its bytes, within a load limit.

    No process writes more than an even share plus the size of the largest file.

    Args:
        held: for each process, tensor name -> bytes of the tensor that it holds.
    """
    sizes = [file.data_bytes for file in files]
    file_of = {name: number for number, file in enumerate(files) for name in file.tensors}
    has = [[0] * len(held) for _ in files]
    for process, tensors in enumerate(held):
        for name, num_bytes in tensors.items():
            has[file_of[name]][process] += num_bytes
    most = sum(sizes) / len(held) + max(sizes, default=0)
    load = [0] * len(held)
    writers = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -sizes[number]):
        free = [process for process in range(len(held)) if load[process] + sizes[number] <= most]
        writer = writers[number] = min(free, key=lambda process: (-has[number][process], load[process]))
        load[writer] += sizes[number]
    return writers
