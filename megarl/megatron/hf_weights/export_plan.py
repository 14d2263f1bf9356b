"""Which rank writes which file of an exported model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megarl.model_files.file_plan import PlannedFile, deal_files, plan_files
from megarl.reshard.layout.layout import Piece, TensorSpec, WeightLayout, volume
from megarl.reshard.transfer.bucket import torch_dtype

FILE_BYTES = 2 * 2**30
"""Of a file's tensors at most; one larger tensor has a file of its own."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Who writes what; the same on every rank."""

    files: tuple[PlannedFile, ...]
    writers: tuple[int, ...]
    """By file, its rank."""
    needs: Mapping[int, WeightLayout]
    """By rank that writes, the tensors of its files; local names are those in the files, boxes the tensors' own."""

    def files_of(self, rank: int) -> list[PlannedFile]:
        """What `rank` writes."""
        return [file for file, writer in zip(self.files, self.writers, strict=True) if writer == rank]


def plan_export(
    folder: Path, layouts: Sequence[WeightLayout], copies: Mapping[str, str] = MappingProxyType({})
) -> ExportPlan:
    """The files of `folder` and their writers, from what every rank holds.

    Args:
        copies: names under which tensors are written once more.
    """
    tensors = layouts[0].tensors
    held = [_held_bytes(layout) for layout in layouts]
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, of in enumerate(held):
        for name in of:
            holders[name].append(rank)
    groups: dict[tuple[int, ...], dict[str, tuple[tuple[int, ...], str]]] = defaultdict(dict)
    written = {name: name for name in tensors} | dict(copies)
    for name, source in written.items():
        groups[tuple(holders[source])][name] = (tensors[source].shape, tensors[source].dtype)
    files = plan_files(folder, list(groups.values()), FILE_BYTES)
    writers = deal_files(files, held)
    order = _interleave(files, writers)
    names: dict[int, list[str]] = defaultdict(list)
    for file, writer in zip(files, writers, strict=True):
        names[writer] += file.tensors
    specs = {name: tensors[name] for name in order if name in tensors}
    needs = {
        writer: WeightLayout(
            specs, tuple(Piece(written[n], specs[written[n]].box, n, specs[written[n]].box) for n in of)
        )
        for writer, of in names.items()
    }
    return ExportPlan(files, tuple(writers), needs)


def _held_bytes(layout: WeightLayout) -> dict[str, int]:
    """By tensor that the rank holds anything of."""
    table = layout.table
    volumes = (table.boxes[..., 1].astype(np.int64) - table.boxes[..., 0]).prod(axis=1)
    held = np.bincount(table.tensor, volumes, minlength=len(table.tensors))
    specs = [layout.tensors[name] for name in table.tensors]
    return {
        # a tied embedding may be held twice
        name: min(int(count) * torch_dtype(spec.dtype).itemsize, num_bytes(spec))
        for name, spec, count in zip(table.tensors, specs, held, strict=True)
        if count
    }


def _interleave(files: Sequence[PlannedFile], writers: Sequence[int]) -> list[str]:
    """The tensors in an order in which all writers get theirs evenly, so that all of them always write."""
    progress: dict[str, float] = {}
    total: dict[int, int] = defaultdict(int)
    for file, writer in zip(files, writers, strict=True):
        for name, stored in file.tensors.items():
            progress[name] = total[writer] + stored.num_bytes / 2
            total[writer] += stored.num_bytes
    for file, writer in zip(files, writers, strict=True):
        for name in file.tensors:
            progress[name] /= max(total[writer], 1)
    return sorted(progress, key=lambda name: progress[name])


def num_bytes(spec: TensorSpec) -> int:
    """Of a whole tensor."""
    return volume(spec.box) * torch_dtype(spec.dtype).itemsize
