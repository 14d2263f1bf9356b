"""Prepares the inputs of both runs: checks the configuration and creates the demo's model and data if missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.config import RunConfig, SftConfig, load_config
from megarl.errors import ConfigError, WorkerError

DEMO_SFT = Path("yaml/demo-sft.yaml")


def read_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Load the configuration and check that runs of it can be compared.

    Raises:
        ConfigError: it is invalid, or disables checkpoints or logs that are compared.
    """
    config = load_config(RunConfig, path, list(overrides))
    if not (config.tracking.rollouts and config.tracking.jsonl):
        raise ConfigError("tracking.rollouts and tracking.jsonl need true: the benchmark compares these logs")
    if config.checkpoint.every < 1:
        raise ConfigError("checkpoint.every needs at least 1, got 0: without checkpoints a run cannot resume")
    return config


def prepare_demo(config: RunConfig, folder: Path, notify: Callable[[str], None]) -> list[str]:
    """Create the demo's data and fine-tuned model in `folder` if `config` uses them and they do not exist.

    Returns overrides with their paths; empty if nothing was created.

    Raises:
        WorkerError: a command that creates them failed.
    """
    if Path(config.model.path).exists() and Path(config.data.file).exists():
        return []
    if not DEMO_SFT.exists() or config.model.path != load_config(SftConfig, DEMO_SFT, []).export_path:
        return []  # the run itself reports what is missing
    notify(f"{config.model.path} is missing: creating the demo's data and fine-tuned model in {folder}")
    _megarl("demo", "--data-only", "--out", str(folder))
    overrides = [f"data.path={folder}/data/sft.jsonl", f"model.path={folder}/base", f"run_dir={folder}/sft"]
    _megarl("sft", str(DEMO_SFT), "--set", *overrides, f"export_dir={folder}/sft/model")
    data = [f"data.path={folder}/data/train.jsonl", f"data.eval_path={folder}/data/heldout.jsonl"]
    return [*data, f"model.path={folder}/sft/model"]


def _megarl(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("megarl")), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise WorkerError(f"megarl {arguments[0]} failed with exit code {done.returncode}:\n{done.stdout}")
