"""One run of TRL's GRPOTrainer on a workload, in the environment of `trl_environment`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil

from benchmarks.end_to_end.timed_run import TimedRun
from benchmarks.end_to_end.workloads import (
    GROUP_SIZE,
    LEARNING_RATE,
    PROMPTS_PER_STEP,
    UPDATES_PER_STEP,
    Workload,
)
from megarl.errors import WorkerError

PROGRAM = Path(__file__).with_name("trl_program.py")

COMPLETIONS_PER_UPDATE = GROUP_SIZE * PROMPTS_PER_STEP // UPDATES_PER_STEP

BATCH_SIZES = (128, 64, 32, 16)
"""Values of `per_device_train_batch_size`; gradients are accumulated up to 128 completions per update."""


def run_trl(
    python: Path, workload: Workload, folder: Path, *, batch_size: int, num_steps: int | None = None
) -> TimedRun:
    """Run the trainer and return the seconds of its steps.

    Args:
        python: Python of TRL's environment.
        folder: folder for its files.
        batch_size: completions per forward and backward pass.
        num_steps: number of counted steps; None: that of the workload.

    Raises:
        WorkerError: the program failed; the message ends with its output.
    """
    folder.mkdir(parents=True)
    num_counted = workload.steps if num_steps is None else num_steps
    (folder / "spec.json").write_text(
        json.dumps(
            {
                "model": str(workload.model),
                "prompts": workload.prompts,
                "max_new_tokens": workload.max_new_tokens,
                "warmup_steps": workload.warmup_steps,
                "steps": num_counted,
                "group_size": GROUP_SIZE,
                "updates_per_step": UPDATES_PER_STEP,
                "completions_per_update": COMPLETIONS_PER_UPDATE,
                "batch_size": batch_size,
                "learning_rate": LEARNING_RATE,
                "threads": len(psutil.Process().cpu_affinity() or []),
                "output": str(folder / "result.json"),
            }
        )
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    done = subprocess.run(
        [str(python), str(PROGRAM), str(folder / "spec.json")],
        cwd=folder,
        env=environment | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WorkerError(f"TRL failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    result = json.loads((folder / "result.json").read_text())
    return TimedRun(seconds=tuple(result["seconds"]), lengths=tuple(result["lengths"]))
