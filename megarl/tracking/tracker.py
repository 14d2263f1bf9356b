"""Logs the metrics of each step to all configured sinks, and writes its completions to a Parquet file."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megarl.batch.trajectory import Trajectory
from megarl.cluster.process.atomic_files import atomic_write, write_durably
from megarl.config.run import SinkConfig, TrackingConfig, WandbConfig
from megarl.config.section import load_class
from megarl.errors import ConfigError, DataError
from megarl.text import describe_error, map_text, replace_surrogates
from megarl.user_code import outcome_of

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


def check_sink(config: SinkConfig, key: str) -> type:
    """Import the class of `tracking.sinks` and return it after checking its methods; no object is created.

    Raises:
        ConfigError: it cannot be imported, is no class, lacks a method, or does not take the arguments.
    """
    found = load_class(config.path, key=f"{key}.path")
    for name in ("log", "close"):
        if not callable(getattr(found, name, None)):
            raise ConfigError(f"{key}.path needs a class with the methods log and close, {config.path} has no {name}")
    try:
        inspect.signature(found).bind(Path(), None, **config.kwargs)
        inspect.signature(found.log).bind(None, {}, step=1)  # type: ignore[attr-defined]
    except TypeError as e:
        raise ConfigError(
            f"{key}: {config.path} needs to take (run_dir, step) and the keyword arguments, and its method log "
            f"(metrics, *, step): {e}"
        ) from e
    return found


class UserSink:
    """A sink outside the package, whose exceptions do not end the run.

    Raises:
        ConfigError: as `check_sink`, or its constructor raised an exception.
    """

    def __init__(
        self, config: SinkConfig, key: str, run_dir: Path, step: int | None, notify: Callable[[str], None]
    ) -> None:
        """`step`: the step that the run resumes from, or None; `notify`: receives a sentence about each exception."""
        self._key, self._notify = key, notify
        self._sink, error = outcome_of(partial(check_sink(config, key), run_dir, step, **config.kwargs))
        if error is not None:
            raise ConfigError(f"{key}: creating {config.path} raised {describe_error(error)}") from error

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass the metrics of one step on."""
        _, error = outcome_of(partial(self._sink.log, dict(metrics), step=step))
        if error is not None:
            self._notify(f"step {step}: {self._key} has lost the metrics: log raised {describe_error(error)}")

    def close(self) -> None:
        """Close the sink."""
        _, error = outcome_of(self._sink.close)
        if error is not None:
            self._notify(f"{self._key}: close raised {describe_error(error)}")


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
        ConfigError: `tracking.wandb` is configured and the wandb package is not installed, or as `UserSink`.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_dir: str | Path,
        *,
        notify: Callable[[str], None],
        resumed: ResumedMetrics | None = None,
        require_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        notify: receives a sentence about each exception of `tracking.sinks`.
        resumed: drop what was logged after this position.
        require_lock: called before each write; raises if this process may no longer write into `run_dir`.
        """
        self._require_lock = require_lock
        require_lock()
        self._run_dir = run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        after = None if resumed is None else resumed.step
        # first, because only these can fail
        for number, sink in enumerate(config.sinks):
            self._sinks.append(UserSink(sink, f"tracking.sinks.{number}", run_dir, after, notify))
        if config.wandb is not None:
            self._sinks.append(WandbSink(config.wandb, run_dir, resumed=resumed is not None))
        if config.jsonl:
            if resumed is not None:
                truncate_lines(run_dir / METRICS_FILE, resumed.num_bytes)
            self._sinks.append(JsonlSink(run_dir / METRICS_FILE))
        if config.tensorboard:
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


ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("prompt_id", pa.string()),
        ("group_id", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("reward_errors", pa.map_(pa.string(), pa.string())),
        ("advantage", pa.float64()),
        ("policy_version_min", pa.int32()),
        ("policy_version_max", pa.int32()),
        ("num_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("segment", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
"""Columns of a file of completions, one row per trajectory.

Rows with `segment` above 0 continue the episode of the row before.

`response` is everything after the prompt, including tool output. `rewards` maps a term to its value, and
`<term>/<name>` to its further values; `reward_errors` maps a term that failed to its message: such a completion was
dropped, and its `reward` and `advantage` are null. Policy versions are those of the sampled tokens (null
if there are none). Surrogates in texts are U+FFFD. The last three columns have one entry per token, prompt first.
"""


def write_rollouts(
    path: str | Path,
    trajectories: Sequence[Trajectory],
    advantages_N: Sequence[float | None] | NDArray[np.floating],
    *,
    step: int,
    decode: Callable[[list[int]], str],
) -> None:
    """Write one row per trajectory to `path`, atomically; creates its folder.

    Args:
        path: the Parquet file.
        trajectories: N of them.
        advantages_N: [N], one advantage per trajectory; None for one that was not trained on.
        step: the step that trained on them.
        decode: token ids -> text; should keep special tokens, to show what the policy saw.
    """
    assert len(trajectories) == len(advantages_N), f"{len(trajectories)} trajectories, {len(advantages_N)} advantages"
    columns = {
        "step": [step] * len(trajectories),
        "prompt_id": [t.prompt_id for t in trajectories],
        "group_id": [t.group_id for t in trajectories],
        "prompt": [decode(t.token_ids[: t.prompt_length].tolist()) for t in trajectories],
        "response": [decode(t.token_ids[t.prompt_length :].tolist()) for t in trajectories],
        "reward": [None if t.reward_errors else t.reward for t in trajectories],
        "rewards": [list(t.rewards.items()) for t in trajectories],
        "reward_errors": [list(t.reward_errors.items()) for t in trajectories],
        "advantage": [None if a is None else float(a) for a in advantages_N],
        "policy_version_min": [_version(t, np.min) for t in trajectories],
        "policy_version_max": [_version(t, np.max) for t in trajectories],
        "num_tokens": [t.num_tokens for t in trajectories],
        "finish_reason": [t.finish_reason for t in trajectories],
        "segment": [t.segment for t in trajectories],
        "token_ids": [t.token_ids for t in trajectories],
        "loss_mask": [t.loss_mask for t in trajectories],
        "logprobs": [t.logprobs for t in trajectories],
    }
    table = pa.table(map_text(columns, replace_surrogates), schema=ROLLOUT_SCHEMA)
    with atomic_write(Path(path)) as draft:
        pq.write_table(table, draft, compression="zstd")


def _version(trajectory: Trajectory, pick: Callable[[NDArray[np.int32]], np.int32]) -> int | None:
    versions = trajectory.policy_versions[trajectory.loss_mask]
    return int(pick(versions)) if len(versions) else None
