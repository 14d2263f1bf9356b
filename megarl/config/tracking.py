from __future__ import annotations

from megarl.config.section import Section


class WandbConfig(Section):
    """Weights & Biases; needs the `wandb` package."""

    project: str
    name: str | None = None


class TrackingConfig(Section):
    """What a run writes into its folder."""

    tensorboard: bool = True
    jsonl: bool = True
    """metrics.jsonl: one object a step."""

    rollouts: bool = True
    """rollouts/*.parquet: every prompt, response, reward, advantage and policy version."""

    wandb: WandbConfig | None = None
