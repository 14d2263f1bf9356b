"""The sections `checkpoint` and `tracking`: what a run writes, and when."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.section import Section


class RecoveryConfig(Section):
    """How a run reacts when one of its processes dies or hangs, and how it shuts down."""

    max_restarts: int = Field(default=20, ge=0)
    """Number of restarts within a day for each process of a kind: with 100 engines, 100 times as many restarts of
    engines. The ranks of the trainer restart together and count as one process. The next failure within the day ends
    the run. 0: no restarts."""

    max_identical_failures: int = Field(default=3, ge=1)
    """Abort after this many identical failures of a process with no completed step in between. An engine is left out
    instead while others serve."""

    engine_stall_seconds: float = Field(default=60.0, gt=0)
    """Seconds without an answer to a ping after which an engine or a rollout worker counts as dead. Each is pinged
    every quarter of this time, while the run waits for completions."""

    node_wait_seconds: float = Field(default=600.0, ge=0)
    """Seconds that a trainer which has lost a node waits for another node to join the cluster."""

    phase_timeout_seconds: float | None = Field(default=3600.0, gt=0)
    """Timeout in seconds of one phase of a step, which fails with a stack dump of every worker. null: no timeout."""

    grace_seconds: float = Field(default=15.0, gt=0)
    """Seconds after SIGTERM that the current step and its checkpoint may take; then the run ends without them. Slurm
    kills after 30 s by default (KillWait), and `megarl launch` after 20 s."""


class CheckpointConfig(Section):
    """Checkpoints that a run can resume from, in `<run_dir>/checkpoints`."""

    every: int = Field(default=20, ge=0)
    """Number of steps between checkpoints. One is also written after the last step, and when the run is stopped early.
    0: none; an interrupted run, or one that loses its trainer, starts over from step 0. Its journal then has only
    the groups of the step in progress, and of later ones, unless `keep_journal` is `all`."""

    keep_last: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep. With 2, a run can resume even if the latest is damaged."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept forever. 0: none."""

    asynchronous: bool = True
    """Write files in the background from a copy in host memory, while training continues."""

    max_staging_bytes: int | None = Field(default=None, ge=0)
    """Limit in bytes of that copy per rank. What exceeds it is written before training continues. Default: no limit."""

    hf: bool = False
    """Also write the model in Hugging Face format, to the checkpoint's folder `hf`. Training waits for this."""

    keep_journal: Literal["needed", "all"] = "needed"
    """Which groups stay in `<run_dir>/journal`. `needed`: those that a run reads that resumes from one of the last
    `keep_last` checkpoints. `all`: of every step, 8 bytes a token, so that `megarl replay` can repeat the whole run."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared with the manifest before a checkpoint is loaded: checksums of all files, or only their sizes."""


class WandbConfig(Section):
    """Logging to Weights & Biases; needs the package `wandb`."""

    project: str
    """Name of the project."""

    name: str | None = None
    """Name of the run in the project. Default: chosen by Weights & Biases."""


class SinkConfig(Section):
    """An output for metrics outside the package."""

    path: str
    """Import path of a class, `package.module:Class`, of which the controller creates one object, as
    `Class(run_dir, step, **kwargs)`: `step` is the step that the run resumes from, or null. The object has the methods
    `log(metrics, *, step)` and `close()`. An exception of `log` is reported, and the metrics of the step are lost in
    this output only."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the class."""


class TrackingConfig(Section):
    """Logs that a run writes."""

    tensorboard: bool = True
    """Write metrics for TensorBoard to the folder `tensorboard`."""

    jsonl: bool = True
    """Write metrics to metrics.jsonl, one object per step."""

    rollouts: bool = True
    """Write every prompt, response, reward, advantage and policy version to rollouts/*.parquet."""

    wandb: WandbConfig | None = None
    """Logging to Weights & Biases. null: none."""

    sinks: tuple[SinkConfig, ...] = ()
    """Further outputs for the metrics of each step."""
