"""Plan of an export: the files, and which rank writes each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megarl.model_files.file_plan import PlannedFile, assign_files, plan_files
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, volume
from megarl.reshard.layout.model_tensors import ModelTensors
from megarl.reshard.transfer.bucket import torch_dtype

FILE_BYTES = 2 * 2**30
"""Maximum size of a file's tensors in bytes; a larger tensor has its own file."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Files of an export and the ranks that write them; identical on every rank."""

    files: tuple[PlannedFile, ...]
    writers: tuple[int, ...]
    """Writing rank of each file."""
    needs: Mapping[int, WeightLayout]
    """Layout that each writing rank needs: the tensors of its files, in full; local names are those in the files."""

    def files_of(self, rank: int) -> list[PlannedFile]:
        """Return the files that `rank` writes."""
        return [file for file, writer in zip(self.files, self.writers, strict=True) if writer == rank]


def plan_export(
    folder: Path, layouts: Sequence[WeightLayout], copies: Mapping[str, str] = MappingProxyType({})
) -> ExportPlan:
    """Plan the files in `folder` and their writers, given the layouts of all ranks.

    Args:
        copies: additional name -> tensor that is also written under that name.
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
    writers = assign_files(files, held)
    order = _interleave_writers(files, writers)
    names: dict[int, list[str]] = defaultdict(list)
    for file, writer in zip(files, writers, strict=True):
        names[writer] += file.tensors
    specs = ModelTensors({name: tensors[name] for name in order if name in tensors})
    needs = {
        writer: WeightLayout(
            specs, tuple(ShardPiece(written[n], specs[written[n]].box, n, specs[written[n]].box) for n in of)
        )
        for writer, of in names.items()
    }
    return ExportPlan(files, tuple(writers), needs)


def _held_bytes(layout: WeightLayout) -> dict[str, int]:
    """Return how many bytes of each tensor the rank holds; tensors that it does not hold are left out."""
    table = layout.pieces
    volumes = (table.boxes[..., 1].astype(np.int64) - table.boxes[..., 0]).prod(axis=1)
    held = np.bincount(table.tensor, volumes, minlength=len(table.tensors))
    specs = [layout.tensors[name] for name in table.tensors]
    return {
        # a rank may hold a tied embedding twice
        name: min(int(count) * torch_dtype(spec.dtype).itemsize, num_bytes(spec))
        for name, spec, count in zip(table.tensors, specs, held, strict=True)
        if count
    }


def _interleave_writers(files: Sequence[PlannedFile], writers: Sequence[int]) -> list[str]:
    """Return the tensors in an order that serves all writers evenly, so that they write at the same time."""
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
    """Return the size of the full tensor in bytes."""
    return volume(spec.box) * torch_dtype(spec.dtype).itemsize
