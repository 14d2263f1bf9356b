"""Metric sinks: one class per output format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.config.tracking import WandbConfig
from megarl.errors import ConfigError
from megarl.process.atomic_files import write_durably

WANDB_ID_FILE = "wandb-id"
"""File in the run folder with the id of its W&B run."""


class Sink(Protocol):
    """An output for the metrics of each step."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step so that a crash right afterwards does not lose them."""

    def close(self) -> None:
        """Finish the output; nothing is logged afterwards."""


class JsonlSink:
    """Writes one JSON object per step: `{"step": 3, "reward/mean": 0.5, ...}`; NaN and infinities become null."""

    def __init__(self, path: Path) -> None:
        # append: a resumed run continues in the same file
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write one line and flush it."""
        assert "step" not in metrics, "a metric named 'step' would hide the step"
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the JSON Lines file."""
        self._file.close()


class TensorboardSink:
    """Writes scalars to TensorBoard event files."""

    def __init__(self, directory: Path, *, after: int | None = None) -> None:
        """`after`: the step that a run resumes from; TensorBoard then drops the events of later steps."""
        from torch.utils.tensorboard import SummaryWriter  # here, because the import takes time

        self._writer = SummaryWriter(str(directory), purge_step=None if after is None else after + 1)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write one event per metric and flush them."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file and end the writer's thread."""
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, config: WandbConfig, directory: Path, *, resumed: bool = False) -> None:
        """`resumed`: continue the W&B run whose id is stored in `directory`."""
        try:
            import wandb
        except ImportError as e:
            raise ConfigError(f"tracking.wandb needs the wandb package (pip install wandb), got: {e}") from e
        file = directory / WANDB_ID_FILE
        same = {"id": file.read_text().strip(), "resume": "allow"} if resumed and file.exists() else {}
        self._run: Any = wandb.init(project=config.project, name=config.name, dir=str(directory), **same)
        write_durably(file, f"{self._run.id}\n")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the remaining metrics and finish the W&B run."""
        self._run.finish()
