"""The section `tracking`: logs of a run."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megarl.config.section import Section


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
