"""Assignment of tensors to the safetensors files of a model folder, with offsets, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megarl.model_files.header import StoredTensor, encode_header, itemsize

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
