"""One run of `megarl train` on a workload."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from benchmarks.chaos.command import Command
from benchmarks.end_to_end.processor_time import ProcessorTime
from benchmarks.end_to_end.timed_run import TimedRun
from benchmarks.end_to_end.workloads import (
    GROUP_SIZE,
    LEARNING_RATE,
    PROMPTS_PER_STEP,
    UPDATES_PER_STEP,
    Workload,
)
from megarl.errors import WorkerError
from megarl.rollout.journal import read_step

NUM_PROCESSES = 2
"""Engines, and trainer ranks, of one thread each: one of either per core."""


def run_megarl(workload: Workload, folder: Path, overrides: Sequence[str]) -> TimedRun:
    """Run `megarl train` in `folder` and return the seconds of its steps.

    Args:
        overrides: values for `--set`.

    Raises:
        WorkerError: the command failed; the message ends with its output.
    """
    folder.mkdir(parents=True)
    data, config = folder / "prompts.jsonl", folder / "run.yaml"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in workload.prompts))
    config.write_text(yaml.safe_dump(_config(workload, data, folder / "run")))
    command = Command(["train", str(config), *(["--set", *overrides] if overrides else [])], folder / "log.txt")
    try:
        command.start()
        processor_time = ProcessorTime(command, folder / "run/metrics.jsonl", workload.warmup_steps)
        code = processor_time.wait()
        if code:
            raise WorkerError(f"megarl train failed with exit code {code}:\n{command.log_tail()}")
        return replace(_read(workload, folder / "run"), processor_seconds=processor_time.seconds_per_step)
    finally:
        command.end()
        command.remove_temporary()


def _config(workload: Workload, data: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "export_dir": None,
        "model": {"path": str(workload.model)},
        "data": {"path": str(data)},
        "algorithm": {
            "type": "grpo",
            "kl_loss": None,
            "group_size": GROUP_SIZE,
            "prompts_per_step": PROMPTS_PER_STEP,
            "num_mini_batches": UPDATES_PER_STEP,
        },
        "trainer": {
            "steps": workload.warmup_steps + workload.steps,
            "eval_every": 0,
            "optimizer": {"lr": LEARNING_RATE},
        },
        "rollout": {"max_new_tokens": workload.max_new_tokens, "replicas": NUM_PROCESSES},
        "reward": {
            "terms": {
                "first_token": {
                    "type": "python",
                    "path": "benchmarks.end_to_end.first_token_reward:score",
                    "per": "group",
                }
            }
        },
        "placement": {"slots_per_node": NUM_PROCESSES},
        "checkpoint": {"every": 0, "keep_journal": "all"},  # lengths of completions are read from it
        "tracking": {"rollouts": False, "tensorboard": False},
    }


def _read(workload: Workload, run_dir: Path) -> TimedRun:
    rows = [row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    counted = rows[workload.warmup_steps :]
    lengths = [
        int(np.count_nonzero(trajectory.loss_mask))
        for step in range(workload.warmup_steps + 1, len(rows) + 1)
        for entry in read_step(run_dir, step)
        for trajectory in entry.trajectories
    ]
    assert lengths, f"the journal of {run_dir} has no completions of the measured steps"
    names = sorted({name for row in counted for name in row if name.startswith("time/") and name.endswith("_seconds")})
    phases = {
        name.removeprefix("time/").removesuffix("_seconds"): median(row.get(name, 0.0) for row in counted)
        for name in names
    }
    return TimedRun(seconds=tuple(row["time/step_seconds"] for row in counted), lengths=tuple(lengths), phases=phases)
