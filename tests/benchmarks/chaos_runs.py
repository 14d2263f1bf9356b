"""Writes folders of fake runs: the parts of each file that the comparison reads, with real checkpoints."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megarl.batch.trajectory import Trajectory
from megarl.tracking.rollout_log import write_rollouts

STEPS, PROMPTS, SAMPLES = 4, 3, 2


def write_fake_run(folder: Path) -> Path:
    """Write a run folder; its content is deterministic except times."""
    for step in range(1, STEPS + 1):
        write_step(folder, step, [f"train.jsonl:{(step - 1) * PROMPTS + group}" for group in range(PROMPTS)])
        log_step(folder, step)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"optimizer.{name}": torch.randn(6, 4, generator=generator) for name in ("param", "exp_avg")}
    write_checkpoint(folder, tensors)
    (folder / "model").mkdir()
    save_file({"weight": tensors["optimizer.param"]}, folder / "model" / "model.safetensors")
    return folder


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], step: int = STEPS) -> None:
    """Write a checkpoint with the folders of two models, the second a bfloat16 copy of the first."""
    at = folder / "checkpoints" / f"step-{step:06d}"
    shutil.rmtree(at, ignore_errors=True)
    for name, state in (("policy", tensors), ("copy", {k: v.bfloat16() for k, v in tensors.items()})):
        save(state | {"rng": b"seven"}, storage_writer=FileSystemWriter(at / name), no_dist=True)
        torch.save({"param_groups": [{"lr": 1e-4, "step": step}]}, at / name / "common.pt")
    state = {
        "step": step,
        "samplers": {"train": {"epoch": 0, "position": 12}},
        "totals": {"seconds": torch.rand(1).item()},
    }
    (at / "state.json").write_text(json.dumps(state))


def write_step(folder: Path, step: int, prompts: list[str], *, shift: float = 0.0) -> None:
    """Write the step's trajectories; `shift` is added to the first log-probability."""
    trajectories = []
    for group, prompt in enumerate(prompts):
        for sample in range(SAMPLES):
            rng = np.random.default_rng([step, group, sample])
            logprobs = rng.standard_normal(5).astype(np.float32)
            logprobs[0] += shift if not trajectories else 0.0
            trajectory = Trajectory(
                prompt_id=prompt,
                group_id=group,
                token_ids=rng.integers(0, 99, 5).astype(np.int32),
                loss_mask=np.array([False, False, True, True, True]),
                logprobs=logprobs,
                policy_versions=np.full(5, step - 1, np.int32),
                rewards={"accuracy": 1.0},
                reward=1.0,
            )
            trajectories.append(trajectory)
    path = folder / "rollouts" / f"step-{step:06d}.parquet"
    write_rollouts(path, trajectories, [0.5] * len(trajectories), step=step, decode=str)


def log_step(folder: Path, step: int, **metrics: float) -> None:
    """Append the step's line to `metrics.jsonl`."""
    line = {"step": step, "loss": 1 / step, "reward/mean": 0.1 * step, "time/rollout_seconds": 0.5}
    times = {"time/train_seconds": 0.25, "time/step_seconds": float(torch.rand(1)) + 0.75}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | times | metrics) + "\n")
