"""Reads the results in the folder of a finished run in a form that can be compared bitwise."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from benchmarks.chaos.watch import METRICS, Line, step_lines
from megarl.checkpoint.compare import read_models

Step: TypeAlias = int

STATE = "state.json"

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
    found = {"name": folder.name, **read_models(folder)}
    if (folder / STATE).exists():
        state = json.loads((folder / STATE).read_text())
        if state.get("schedule") is not None:
            del state["schedule"]["num_events"]  # a resumed run has logged more events
        found |= {f"{STATE}/{key}": value for key, value in state.items() if key not in TIMING_FIELDS}
    return found


def read_model(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the exported safetensors files, by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
