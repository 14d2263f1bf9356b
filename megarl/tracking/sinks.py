"""Where metrics go: one class per kind of record."""

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
"""Names a run's run."""


class Sink(Protocol):
    """Takes one step's metrics at a time."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record them, so that a crash right after does not lose them."""

    def close(self) -> None:
        """Finish; nothing is logged afterwards."""


class JsonlSink:
    """One JSON object a step: `{"step": 3, "reward/mean": 0.5, ...}`. NaN and infinities are null, as JSON has none."""

    def __init__(self, path: Path) -> None:
        # Appended to, so that a resumed run goes on in the same file.
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write and flush one line."""
        assert "step" not in metrics, "a metric named 'step' would hide the step"
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorboardSink:
    """Scalars in TensorBoard event files, written by tensorboard itself: neither torch nor tensorflow is loaded."""

    def __init__(self, directory: Path, *, after: int | None = None) -> None:
        """`after`: the step that a run goes on from; TensorBoard then forgets what it was told of later ones."""
        self._writer = EventFileWriter(str(directory))
        if after is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=after + 1, session_log=start))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write and flush one event."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file and end the writer's thread."""
        self._writer.close()


class WandbSink:
    """Weights & Biases.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, config: WandbConfig, directory: Path, *, resumed: bool = False) -> None:
        """`resumed`: log on into the run that is named in `directory`."""
        try:
            import wandb
        except ImportError as e:
            raise ConfigError(f"tracking.wandb needs the wandb package (pip install wandb), got: {e}") from e
        file = directory / WANDB_ID_FILE
        same = {"id": file.read_text().strip(), "resume": "allow"} if resumed and file.exists() else {}
        self._run: Any = wandb.init(project=config.project, name=config.name, dir=str(directory), **same)
        file.write_text(f"{self._run.id}\n")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand one step over."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()
