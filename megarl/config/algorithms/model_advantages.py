"""Algorithms whose per-token advantages come from another language model: PRIME, on-policy distillation."""

from __future__ import annotations

from typing import ClassVar, override

from pydantic import Field, model_validator

from megarl.config.algorithms.model_sections import FrozenModelConfig, ModelUse, TrainedModelConfig
from megarl.config.algorithms.policy import ClippedPolicyConfig
from megarl.config.trainer import OptimizerConfig


class PrimeConfig(ClippedPolicyConfig):
    """Process reinforcement through implicit rewards (arXiv 2502.01456)."""

    needs_group: ClassVar[bool] = True
    advantage_source: ClassVar[str] = "its reward model and outcomes"
    sequence_level: ClassVar[str | None] = "the loss of its reward model"
    supports_turn_advantages: ClassVar[bool] = False
    type: str = "prime"

    reward_model: TrainedModelConfig = TrainedModelConfig(optimizer=OptimizerConfig(lr=1e-6))
    """The implicit process reward model: a language model that is trained in every step."""

    beta: float = Field(default=0.05, gt=0)
    """Scale of process rewards: a token's is beta * (log pi_rm - log pi_reference)."""

    process_coefficient: float = Field(default=5.0, ge=0)
    """Factor of the advantages from process rewards."""

    outcome_coefficient: float = Field(default=5.0, ge=0)
    """Factor of the advantages from outcome rewards."""

    scale_process: bool = False
    """Multiply the deviation of a token's process reward from its completion's mean by n / (n - 1), n the group's
    size."""

    whiten: bool = False
    """Normalize a step's advantages to mean 0 and standard deviation 1."""

    whiten_unbiased: bool = False
    """Whitening divides by the standard deviation with n - 1 instead of n."""

    min_accuracy: float = Field(default=0.2, ge=0, le=1)
    """Prompts whose fraction of correct completions is below this are dropped from the step."""

    max_accuracy: float = Field(default=0.8, ge=0, le=1)
    """Prompts whose fraction of correct completions is above this are dropped from the step."""

    @model_validator(mode="after")
    def _check_accuracy_range(self) -> PrimeConfig:
        if self.min_accuracy > self.max_accuracy:
            raise ValueError(
                f"min_accuracy needs to be at most max_accuracy, got {self.min_accuracy:g} > {self.max_accuracy:g}: no "
                "prompt would be kept"
            )
        return self

    @property
    @override
    def uses_reference(self) -> bool:
        return True  # process rewards are relative to it

    @override
    def models(self) -> tuple[ModelUse, ...]:
        reward_model = ModelUse(
            name="reward_model", field="reward_model", section=self.reward_model, role="reward_models"
        )
        return (*super().models(), reward_model)


class DistillationConfig(ClippedPolicyConfig):
    """On-policy distillation: a token's advantage is log pi_teacher - log pi (arXiv 2306.13649, reverse KL)."""

    advantage_source: ClassVar[str] = "its teacher"
    supports_turn_advantages: ClassVar[bool] = False
    type: str = "distillation"
    group_size: int = Field(default=1, ge=1)

    teacher: FrozenModelConfig = FrozenModelConfig()
    """The teacher model. `teacher.path` is required, and the teacher needs the policy's vocabulary."""

    @model_validator(mode="after")
    def _check_teacher(self) -> DistillationConfig:
        if self.teacher.path is None:
            raise ValueError("teacher.path is required: the folder of the model to distill from")
        return self

    @override
    def models(self) -> tuple[ModelUse, ...]:
        return (*super().models(), ModelUse(name="teacher", field="teacher", section=self.teacher))
