"""Auxiliary models of an algorithm: the sections that describe them, and their declaration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from megarl.config.section import FilePath, Section
from megarl.config.trainer import OptimizerConfig, ParallelConfig


class FrozenModelConfig(Section):
    """A model that is evaluated and never trained."""

    path: FilePath | None = None
    """Folder of the model in Hugging Face format, or a hub id as in `model.path`. Default: `model.path`."""

    parallel: ParallelConfig | None = None
    """Parallel sizes of the model. Default: those of `trainer.parallel`."""


class TrainedModelConfig(FrozenModelConfig):
    """A model that is trained along with the policy."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the model, separate from the policy's."""


class CriticConfig(TrainedModelConfig):
    """A value model that predicts the return still to come, trained along with the policy."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer of the critic, separate from the policy's."""

    clip: float | None = Field(default=0.5, gt=0)
    """Range of the clipped value loss: a value that has moved further than this from its old value gets no gradient
    away from it. null: no clipping."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps that train the critic only, not the policy. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """Declares that an algorithm uses a model in addition to the policy."""

    name: str
    """Unique name within the run: key of `RLRun.models`, prefix of the model's metrics, folder of its checkpoint."""
    field: str
    """Name of the field of the algorithm's section that holds `section`, for error messages."""
    section: FrozenModelConfig
    """Folder, layout and, for a `TrainedModelConfig`, the optimizer of the model."""
    head: Literal["lm", "value"] = "lm"
    """Output layer: language-model logits or one value per token."""
    role: str | None = None
    """Key under `placement` that chooses the model's pool. Default: `name`."""
