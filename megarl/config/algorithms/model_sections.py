"""Sections that describe an auxiliary model: its folder, layout and optimizer."""

from __future__ import annotations

from pydantic import Field

from megarl.config.section import Section
from megarl.config.trainer import OptimizerConfig, ParallelConfig


class FrozenModelConfig(Section):
    """A model that is evaluated and never trained."""

    path: str | None = None
    """Folder of the model in Hugging Face format. Default: `model.path`."""

    parallel: ParallelConfig | None = None
    """Parallel sizes of the model. Default: those of `trainer.parallel`."""


class CriticConfig(FrozenModelConfig):
    """A value model that predicts the return still to come, trained along with the policy."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer of the critic, separate from the policy's."""

    clip: float | None = Field(default=0.5, gt=0)
    """Range of the clipped value loss: a value that has moved further than this from its old value gets no gradient
    away from it. null: no clipping."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps that train the critic only, not the policy. 0: none."""
