"""Stages that learn from pairs of answers, one of them preferred."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megarl.config.algorithms.algorithm import FrozenModelConfig
from megarl.config.run import StageConfig
from megarl.config.section import Section


class PreferenceConfig(StageConfig):
    """What the stages share; `trainer.batch_size` counts pairs, and so does `data.eval_size`."""

    @model_validator(mode="after")
    def _offloads_nothing(self) -> PreferenceConfig:
        if self.trainer.offload.anything:
            raise ValueError("trainer.offload: learning from pairs has no phase in which engines need the memory")
        return self


class ScoreModelConfig(Section):
    """A model that says of an answer how good, or how harmful, it is."""

    kind: Literal["reward", "cost"] = "reward"
    """`reward`: the chosen answer is the better one and scores higher (arXiv 2203.02155, equation 1). `cost`: it is the
    less harmful one and scores lower; where rows say which answers are safe, those come to score below 0 and the others
    above (arXiv 2310.12773, equations 6 and 7)."""


class RmConfig(PreferenceConfig):
    """`megarl rm`: a reward or cost model from pairs."""

    rm: ScoreModelConfig = ScoreModelConfig()


class DirectPreferenceConfig(Section):
    """Direct preference optimisation (arXiv 2305.18290)."""

    beta: float = Field(default=0.1, gt=0)
    """The reward of an answer is beta * (log pi - log pi_reference)."""

    nll: float = Field(default=0.0, ge=0)
    """Factor of the chosen answer's negative log-likelihood per token; with it, this is RPO (arXiv 2404.19733)."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """What rewards measure from. Default: the model that training starts from, asked before the first step."""

    @model_validator(mode="after")
    def _has_reference(self) -> DirectPreferenceConfig:
        if self.reference.parallel is not None and self.reference.path is None:
            raise ValueError("reference.parallel needs reference.path: without it the trainer's own ranks are asked")
        return self


class DpoConfig(PreferenceConfig):
    """`megarl dpo`: a policy from pairs, without a reward model."""

    dpo: DirectPreferenceConfig = DirectPreferenceConfig()
