"""Metrics of a run, to every record that the configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.config.tracking import TrackingConfig
from megarl.errors import DataError
from megarl.tracking.sinks import JsonlSink, Sink, TensorboardSink, WandbSink

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

LINE_BYTES = 2**20
"""More than a line of metrics has."""


@dataclass(frozen=True, slots=True)
class ResumedMetrics:
    """Where the records stood at the step that a run goes on from."""

    step: int
    num_bytes: int
    """Of `metrics.jsonl`."""


def cut(path: Path, num_bytes: int) -> None:
    """Drop what `path` holds behind its first `num_bytes`; of a shorter file, a last line that is not whole."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size < num_bytes:
            file.seek(max(0, size - LINE_BYTES))
            num_bytes = size - len(file.read().rpartition(b"\n")[2])
        file.truncate(num_bytes)


class Tracker:
    """Writes into `run_dir`: `metrics.jsonl`, `tensorboard/` and what W&B keeps.

    Raises:
        ConfigError: `tracking.wandb` without the package.
    """

    def __init__(self, config: TrackingConfig, run_dir: str | Path, *, resumed: ResumedMetrics | None = None) -> None:
        """`resumed`: forget what was logged behind it."""
        self._run_dir = run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        # First, because it is the one that can fail.
        if config.wandb is not None:
            self._sinks.append(WandbSink(config.wandb, run_dir, resumed=resumed is not None))
        if config.jsonl:
            if resumed is not None:
                cut(run_dir / METRICS_FILE, resumed.num_bytes)
            self._sinks.append(JsonlSink(run_dir / METRICS_FILE))
        if config.tensorboard:
            after = None if resumed is None else resumed.step
            self._sinks.append(TensorboardSink(run_dir / TENSORBOARD_FOLDER, after=after))

    @property
    def num_bytes(self) -> int:
        """Length of `metrics.jsonl`, which is on the disk so far; 0 where there is none."""
        path = self._run_dir / METRICS_FILE
        if not path.exists():
            return 0
        with path.open("rb") as file:
            with suppress(OSError):  # it is told when the next line is written
                os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one step's metrics everywhere, flushed.

        Raises:
            DataError: the disk refuses them.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            try:
                sink.log(numbers, step=step)
            except OSError as e:
                raise DataError(f"the metrics of step {step} cannot be written to {self._run_dir}: {e}") from e

    def close(self) -> None:
        """Close every record; a second time does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
