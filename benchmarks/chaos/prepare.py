"""What both runs begin with: the configuration's model and data, made where they are the demo's and not there yet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.config import RunConfig, SftConfig, load_config
from megarl.errors import ConfigError, WorkerError

DEMO_SFT = Path("yaml/demo-sft.yaml")


def read_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Of a run whose outcome can be compared.

    Raises:
        ConfigError: it cannot.
    """
    config = load_config(RunConfig, path, list(overrides))
    if not (config.tracking.rollouts and config.tracking.jsonl):
        raise ConfigError("tracking.rollouts and tracking.jsonl need true, as both runs' are compared")
    if config.checkpoint.every < 1:
        raise ConfigError("checkpoint.every needs at least 1, without checkpoints no run comes back; got 0")
    return config


def make_demo(config: RunConfig, folder: Path, say: Callable[[str], None]) -> list[str]:
    """Overrides that name the demo's data and fine-tuned model in `folder`, where `config` asks for those and has none.

    Raises:
        WorkerError: they could not be made.
    """
    if Path(config.model.path).exists() and Path(config.data.path).exists():
        return []
    if not DEMO_SFT.exists() or config.model.path != load_config(SftConfig, DEMO_SFT, []).export_path:
        return []  # the run itself says what is missing
    say(f"{config.model.path} is missing: making the demo's data and fine-tuned model in {folder}")
    _megarl("demo", "--data-only", "--out", str(folder))
    overrides = [f"data.path={folder}/data/sft.jsonl", f"model.path={folder}/base", f"run_dir={folder}/sft"]
    _megarl("sft", str(DEMO_SFT), "--set", *overrides, f"export_dir={folder}/sft/model")
    data = [f"data.path={folder}/data/train.jsonl", f"data.eval_path={folder}/data/heldout.jsonl"]
    return [*data, f"model.path={folder}/sft/model"]


def _megarl(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("megarl")), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise WorkerError(f"megarl {arguments[0]} ended with exit code {done.returncode}:\n{done.stdout}")
