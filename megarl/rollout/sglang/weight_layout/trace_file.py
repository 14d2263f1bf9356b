"""File format of an engine's traces, as numpy arrays: 32 ranks of DeepSeek-V3 have 1.5 million pieces."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.reshard.layout.layout import Columns, PieceTable, TensorSpec, WeightLayout, share_tensors
from megarl.reshard.layout.model_tensors import ModelTensors
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, Padding

ARRAYS = ("tensor", "local", "dims", "boxes", "local_boxes")
"""Arrays of a rank's `PieceTable`; the first two are indices into its lists of names."""


def write_traces(file: Path, traces: Sequence[EngineTrace]) -> None:
    """Write the traces of an engine's ranks, which load the same tensors."""
    tensors: dict[str, TensorSpec] = {}
    for trace in traces:
        tensors |= trace.layout.tensors
    names = {name: i for i, name in enumerate(tensors)}
    locals_: dict[str, int] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for rank, trace in enumerate(traces):
        table = trace.layout.pieces
        arrays |= {f"{rank}.{array}": getattr(table, array) for array in ARRAYS}
        arrays[f"{rank}.tensors"] = np.array([names[name] for name in table.tensors], np.int32)
        arrays[f"{rank}.locals"] = np.array([locals_.setdefault(n, len(locals_)) for n in table.locals], np.int32)
    header = {
        "tensors": [[name, spec.shape, spec.dtype] for name, spec in tensors.items()],
        "locals": list(locals_),
        "padding": [[[pad.local, pad.local_box, pad.value] for pad in trace.padding] for trace in traces],
        "derived": [trace.derived for trace in traces],
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with file.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def read_traces(file: Path) -> list[EngineTrace] | None:
    """Read a file of `write_traces`, with pieces as `PieceTable`s; None if the file is missing or invalid."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return _decode(arrays)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def _decode(arrays: Mapping[str, NDArray[Any]]) -> list[EngineTrace]:
    header = json.loads(arrays["header"].tobytes())
    tensors = ModelTensors({name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in header["tensors"]})
    traces: list[EngineTrace] = []
    for rank, (padding, derived) in enumerate(zip(header["padding"], header["derived"], strict=True)):
        of_tensors = [tensors.names[i] for i in arrays[f"{rank}.tensors"]]
        of_locals = [header["locals"][i] for i in arrays[f"{rank}.locals"]]
        columns = Columns(*(arrays[f"{rank}.{array}"] for array in ARRAYS))
        table = PieceTable(of_tensors, of_locals, columns)
        pads = tuple(Padding(local, tuple(map(tuple, box)), value) for local, box, value in padding)
        traces.append(EngineTrace(WeightLayout(tensors, table), pads, tuple(derived)))
    layouts = share_tensors([trace.layout for trace in traces])
    return [replace(trace, layout=layout) for trace, layout in zip(traces, layouts, strict=True)]
