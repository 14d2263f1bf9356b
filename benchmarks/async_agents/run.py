"""One run of the calculator's recipe with a slow tool, and what is read from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.chaos.command import Command
from benchmarks.end_to_end.processor_time import ProcessorTime
from benchmarks.mismatch.measure import read_rows, run_megarl
from megarl.errors import WorkerError

ROOT = Path(__file__).parents[2]
SCHEDULES = ("sync", "async")
LAST_STEPS = 5
"""Steps over which the reward of samples at the end is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the two runs have in common."""

    steps: int = 30
    prompts_per_step: int = 8
    group_size: int = 8
    learning_rate: float = 3e-4
    """At the first steps; it decays linearly, so that the rewards at the end vary little from step to step."""
    lookahead: int = 3
    """Of the asynchronous run; its `max_staleness` is the default."""
    latency_seconds: float = 0.3
    """Mean of the latency of a call."""
    latency_sigma: float = 1.0
    """Standard deviation of its logarithm."""
    eval_samples: int = 4
    """Sampled episodes of each held-out problem, after the last step."""
    seed: int = 0

    def overrides(self, schedule: str) -> dict[str, object]:
        """Return the values for `--set` of a run, without its paths."""
        values: dict[str, object] = {
            "seed": self.seed,
            "trainer.steps": self.steps,
            "trainer.eval_every": 0,
            "trainer.optimizer.lr": self.learning_rate,
            "trainer.optimizer.decay": "linear",
            "algorithm.prompts_per_step": self.prompts_per_step,
            "algorithm.group_size": self.group_size,
            "rollout.env.path": "benchmarks.async_agents.slow_calculator:SlowCalculator",
            "rollout.env.kwargs.mean_seconds": self.latency_seconds,
            "rollout.env.kwargs.sigma": self.latency_sigma,
            "eval.samples": self.eval_samples,
            "schedule.type": schedule,
            "placement.slots_per_node": 1,
            "checkpoint.every": 0,
            "tracking.rollouts": "false",
            "tracking.tensorboard": "false",
            "export_dir": "null",
        }
        return values | ({"schedule.lookahead": self.lookahead} if schedule == "async" else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """What a run with one schedule took and reached."""

    schedule: str
    steps: int
    steps_per_second: float
    """Steps over the time of all of them, from the first prompt to the last push, without evaluations."""
    held_out: float
    """Mean reward of sampled episodes of held-out problems, after the last step."""
    sampled: float
    """Mean reward of the episodes of the last steps."""
    mean_staleness: float
    """Of the tokens trained on, mean over the steps."""
    waiting_seconds: float
    """Mean time that a step waited for its batch."""
    training_seconds: float
    """Mean time of the training of a step."""
    own_cpu_seconds: float
    """Mean CPU seconds of the run's processes in a step, after the first one."""
    other_cpu_seconds: float
    """Mean CPU seconds of the other processes of the machine in a step, Ray's own included."""


def prepare_model(folder: Path, notify: Callable[[str], None]) -> None:
    """Write the calculator's problems and fine-tune its model in `folder`, if an earlier call has not.

    Raises:
        WorkerError: the problems could not be written.
        MegarlError: the fine-tuning failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "runs/calculator/sft/model").exists():
        return
    notify("writing problems, and fine-tuning a model on demonstrations")
    script = ROOT / "examples/environments/make_data.py"
    command = [sys.executable, str(script), "calculator", "runs/calculator/data"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if made.returncode:
        raise WorkerError(f"{script.name} ended with exit code {made.returncode}: {made.stderr[-2000:]}")
    run_megarl("sft", str(ROOT / "yaml/agents/calculator-sft.yaml"), {}, folder=folder)


def run_schedule(folder: Path, schedule: str, setup: Setup) -> ScheduleReport:
    """Train with the schedule in `folder`, on the model of `prepare_model`.

    Raises:
        WorkerError: the run failed.
    """
    run_dir, calculator = folder / schedule, folder / "runs/calculator"
    paths = {
        "run_dir": run_dir,
        "model.path": calculator / "sft/model",
        "data.path": calculator / "data/train.jsonl",
        "data.eval_path": calculator / "data/heldout.jsonl",
    }
    settings = [f"{key}={value}" for key, value in {**setup.overrides(schedule), **paths}.items()]
    command = Command(["train", str(ROOT / "yaml/agents/calculator.yaml"), "--set", *settings], folder / "log.txt")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        command.start()
        cpu_time = ProcessorTime(command, run_dir / "metrics.jsonl", first_step=1)
        code = cpu_time.wait()
        if code:
            raise WorkerError(f"{schedule} ended with exit code {code}:\n{command.log_tail()}")
    finally:
        command.end()
        command.remove_temporary()
    held_out = json.loads((run_dir / "summary.json").read_text())["eval_after"]
    own = cpu_time.seconds_per_step
    return read_report(
        schedule, read_rows(run_dir), held_out=held_out, own=own, machine=cpu_time.machine_seconds_per_step
    )


def read_report(
    schedule: str, rows: Sequence[Mapping[str, Any]], *, held_out: float, own: Mapping[str, float], machine: float
) -> ScheduleReport:
    """Return the report of a finished run from the rows of its metrics.

    Args:
        held_out: mean reward on held-out problems after the last step.
        own: CPU seconds of a step by kind of process of the run.
        machine: CPU seconds of all processes of the machine in a step.
    """
    steps = [row for row in rows if "time/step_seconds" in row]
    return ScheduleReport(
        schedule=schedule,
        steps=len(steps),
        steps_per_second=len(steps) / sum(row["time/step_seconds"] for row in steps),
        held_out=held_out,
        sampled=mean(row["reward/mean"] for row in steps[-LAST_STEPS:]),
        mean_staleness=mean(row.get("staleness/mean", 0.0) for row in steps),
        waiting_seconds=mean(row["time/rollout_seconds"] for row in steps),
        training_seconds=mean(row.get("time/train_seconds", 0.0) for row in steps),
        own_cpu_seconds=sum(own.values()),
        other_cpu_seconds=max(0.0, machine - sum(own.values())),
    )
