"""The section `tracking`: logs of a run."""

from __future__ import annotations

from megarl.config.section import Section


class WandbConfig(Section):
    """Logging to Weights & Biases; needs the package `wandb`."""

    project: str
    """Name of the project."""

    name: str | None = None
    """Name of the run in the project. Default: chosen by Weights & Biases."""


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
