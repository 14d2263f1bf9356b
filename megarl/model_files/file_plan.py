"""Which tensor goes to which file of a model folder, and where in it: known before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megarl.model_files.header import StoredTensor, encode_header, itemsize

Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Name -> shape and dtype as torch names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One safetensors file that is to be written."""

    name: str
    """In the folder, once it is whole."""
    header: bytes
    tensors: Mapping[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """Of its tensors."""
        return sum(stored.num_bytes for stored in self.tensors.values())

    @property
    def partial_name(self) -> str:
        """In the folder, until it is whole."""
        return f".{self.name}.partial"


def plan_files(folder: Path, groups: Sequence[Tensors], max_bytes: int) -> tuple[PlannedFile, ...]:
    """The files of `folder`: each of tensors of one group, unless all of them fit into one file.

    Args:
        max_bytes: of a file's tensors; a larger tensor has a file of its own.
    """
    every = {name: tensor for group in groups for name, tensor in group.items()}
    if sum(map(_num_bytes, every.values())) <= max_bytes:
        contents: list[Tensors] = [every]
    else:
        contents = [content for group in groups for content in _cut(group, max_bytes)]
    count = len(contents)
    return tuple(_plan_file(folder, content, number, count) for number, content in enumerate(contents, start=1))


def _plan_file(folder: Path, tensors: Tensors, number: int, count: int) -> PlannedFile:
    name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
    header, stored = encode_header(tensors, folder / name)
    return PlannedFile(name=name, header=header, tensors=stored)


def _cut(tensors: Tensors, max_bytes: int) -> Iterator[Tensors]:
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


def deal_files(files: Sequence[PlannedFile], held: Sequence[Mapping[str, int]]) -> list[int]:
    """By file, which process writes it: the one that holds most of it, as long as none writes too much.

    Too much is more than an even share and a file beyond that.

    Args:
        held: by process, bytes that it holds of each tensor.
    """
    sizes = [file.data_bytes for file in files]
    file_of = {name: number for number, file in enumerate(files) for name in file.tensors}
    has = [[0] * len(held) for _ in files]
    for process, of in enumerate(held):
        for name, num_bytes in of.items():
            has[file_of[name]][process] += num_bytes
    most = sum(sizes) / len(held) + max(sizes, default=0)
    load = [0] * len(held)
    writers = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -sizes[number]):
        free = [process for process in range(len(held)) if load[process] + sizes[number] <= most]
        writer = writers[number] = min(free, key=lambda process: (-has[number][process], load[process]))
        load[writer] += sizes[number]
    return writers
