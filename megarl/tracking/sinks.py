"""Metric sinks: one class per output format."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

from megarl.config.tracking import WandbConfig
from megarl.errors import ConfigError

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
    """Writes scalars to TensorBoard event files, with the tensorboard package: loads neither torch nor tensorflow."""

    def __init__(self, directory: Path, *, after: int | None = None) -> None:
        """`after`: the step that a run resumes from; TensorBoard then drops the events of later steps."""
        self._writer = EventFileWriter(str(directory))
        if after is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=after + 1, session_log=start))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write one event and flush it."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
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
        file.write_text(f"{self._run.id}\n")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the remaining metrics and finish the W&B run."""
        self._run.finish()
