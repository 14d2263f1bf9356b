"""Logs the metrics of a run to all configured sinks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.config.tracking import TrackingConfig
from megarl.errors import DataError
from megarl.text import replace_surrogates
from megarl.tracking.sinks import JsonlSink, Sink, TensorboardSink, WandbSink

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

MAX_LINE_BYTES = 2**20
"""Upper bound on the length of a line of metrics."""


@dataclass(frozen=True, slots=True)
class ResumedMetrics:
    """Position of the metrics at the step that a run resumes from."""

    step: int
    num_bytes: int
    """Length of `metrics.jsonl` at that step."""


def truncate_lines(path: Path, num_bytes: int) -> None:
    """Truncate `path` to its first `num_bytes` bytes; from a shorter file, drop an incomplete last line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size < num_bytes:
            file.seek(max(0, size - MAX_LINE_BYTES))
            num_bytes = size - len(file.read().rpartition(b"\n")[2])
        file.truncate(num_bytes)


class Tracker:
    """Writes metrics to `run_dir`: `metrics.jsonl`, `tensorboard/` and W&B files, as configured.

    Raises:
        ConfigError: `tracking.wandb` is configured and the wandb package is not installed.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_dir: str | Path,
        *,
        resumed: ResumedMetrics | None = None,
        require_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        resumed: drop what was logged after this position.
        require_lock: called before each write; raises if this process may no longer write into `run_dir`.
        """
        self._require_lock = require_lock
        require_lock()
        self._run_dir = run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        # first, because only this one can fail
        if config.wandb is not None:
            self._sinks.append(WandbSink(config.wandb, run_dir, resumed=resumed is not None))
        if config.jsonl:
            if resumed is not None:
                truncate_lines(run_dir / METRICS_FILE, resumed.num_bytes)
            self._sinks.append(JsonlSink(run_dir / METRICS_FILE))
        if config.tensorboard:
            after = None if resumed is None else resumed.step
            self._sinks.append(TensorboardSink(run_dir / TENSORBOARD_FOLDER, after=after))

    @property
    def num_bytes(self) -> int:
        """Length of `metrics.jsonl`, after an fsync; 0 if there is no such file."""
        path = self._run_dir / METRICS_FILE
        if not path.exists():
            return 0
        with path.open("rb") as file:
            with suppress(OSError):  # the next write reports the error
                os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log one step's metrics to all sinks and flush them.

        Raises:
            DataError: a file cannot be written.
            LostLockError: `require_lock` found that another run has taken over the folder; nothing is written.
        """
        self._require_lock()
        numbers = {replace_surrogates(name): float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            try:
                sink.log(numbers, step=step)
            except OSError as e:
                raise DataError(f"the metrics of step {step} cannot be written to {self._run_dir}: {e}") from e

    def close(self) -> None:
        """Close all sinks; a second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
