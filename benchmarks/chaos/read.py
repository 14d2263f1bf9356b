"""Reads the results in the folder of a finished run in a form that can be compared bitwise."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from benchmarks.chaos.watch import METRICS, Line, step_lines

Step: TypeAlias = int

INDEX, COMMON, STATE = ".metadata", "common.pt", "state.json"

TIMING_FIELDS = ("totals", "metrics_bytes")
"""Fields of `state.json` that depend on timing: run totals, and the length of a file that holds times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Logged trajectories of a run."""

    prompt_ids: Mapping[Step, list[str]]
    """Prompt ids of each step, in the order of its groups."""
    rows: Mapping[Step, str]
    """All columns of each step's file, as text that differs if any bit differs."""
    samples: Counter[tuple[Step, str]]
    """Number of trajectories in all files, by the step and prompt id in their rows."""


def read_rollouts(run: Path) -> Rollouts:
    """Read the `rollouts` folder of a run."""
    prompt_ids: dict[Step, list[str]] = {}
    rows: dict[Step, str] = {}
    samples: Counter[tuple[Step, str]] = Counter()
    for path in sorted(run.glob("rollouts/step-*.parquet")):
        step = int(path.stem.removeprefix("step-"))
        columns = pq.read_table(path).to_pydict()
        groups = dict(zip(columns["group_id"], columns["prompt_id"], strict=True))
        prompt_ids[step] = [groups[group] for group in sorted(groups)]
        rows[step] = repr(columns)  # repr of a float is exact
        samples.update(zip(columns["step"], columns["prompt_id"], strict=True))
    return Rollouts(prompt_ids=prompt_ids, rows=rows, samples=samples)


def read_metrics(run: Path) -> dict[Step, list[Line]]:
    """Return step -> its lines of `metrics.jsonl`."""
    path = run / METRICS
    return step_lines(path.read_text()) if path.exists() else {}


def read_last_checkpoint(run: Path) -> dict[str, Any]:
    """Return all values of the newest checkpoint as `<file or index folder>/<name>` -> value; tensors are unsharded."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    if not folders:
        return {}
    folder = folders[-1]
    found: dict[str, Any] = {"name": folder.name}
    for index in sorted(folder.rglob(INDEX)):
        name = index.parent.relative_to(folder).as_posix()
        found |= {f"{name}/{key}": value for key, value in _read_distributed(index.parent).items()}
    for path in sorted(folder.rglob(COMMON)):
        found[path.relative_to(folder).as_posix()] = torch.load(path, weights_only=False)
    if (folder / STATE).exists():
        state = json.loads((folder / STATE).read_text())
        found |= {f"{STATE}/{key}": value for key, value in state.items() if key not in TIMING_FIELDS}
    return found


def _read_distributed(folder: Path) -> dict[str, Any]:
    index = FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {}
    for name, stored in index.state_dict_metadata.items():
        state[name] = None
        if isinstance(stored, TensorStorageMetadata):
            # zeros: the checkpoint need not store every element
            state[name] = torch.zeros(stored.size, dtype=stored.properties.dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_distributed(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return state


def read_model(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the exported safetensors files, by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
