from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from megarl.config.section import Section, by_type

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class PolicyLossConfig(Section):
    """Fields that every clipped policy-gradient algorithm shares."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts that one controller step samples."""

    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per controller step; the step's groups are split evenly among them."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The importance ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(default=0.2, gt=0)
    """The importance ratio is clipped above at 1 + clip_high."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of negative advantages at -dual_clip * A (arXiv 1912.09729). Default: off."""

    aggregation: Aggregation = "token-mean"
    """How token losses become one number; every denominator is global over the mini-batch."""

    length_norm: int | None = Field(default=None, ge=1)
    """The constant that `seq-mean-token-sum-norm` divides by. Default: rollout.max_new_tokens."""


class GrpoConfig(PolicyLossConfig):
    """Group-relative policy optimisation (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"

    group_size: int = Field(default=8, ge=2)
    """Completions sampled per prompt."""

    normalize_by_std: bool = True
    """Divide group-centred rewards by the group's standard deviation; false gives Dr.GRPO's advantage."""

    @model_validator(mode="after")
    def _mini_batches_split_prompts(self) -> GrpoConfig:
        if self.prompts_per_step % self.mini_batches:
            raise ValueError(
                f"mini_batches needs to divide prompts_per_step, got {self.prompts_per_step} % {self.mini_batches} = "
                f"{self.prompts_per_step % self.mini_batches}"
            )
        return self


AlgorithmConfig = Annotated[Annotated[GrpoConfig, Tag("grpo")], by_type("grpo")]
"""A discriminated union with one member; the next algorithm joins it with `|`."""
