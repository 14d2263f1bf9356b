"""Configuration of the stages that train on preference pairs: `megarl rm` and `megarl dpo`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megarl.config.algorithms.policy import FrozenModelConfig
from megarl.config.run import SupervisedStageConfig
from megarl.config.section import Section


class PreferenceConfig(SupervisedStageConfig):
    """Configuration of a stage on preference pairs: `trainer.batch_size` and `data.eval_size` count pairs."""


class ScoreModelConfig(Section):
    """The kind of score model that `megarl rm` trains."""

    kind: Literal["reward", "cost"] = "reward"
    """`reward`: the chosen answer is the better one and gets the higher score (arXiv 2203.02155, equation 1). `cost`:
    the chosen answer is the less harmful one and gets the lower score; where rows have safety labels, safe answers are
    trained to score below 0 and unsafe ones above (arXiv 2310.12773, equations 6 and 7)."""


class RmConfig(PreferenceConfig):
    """`megarl rm`: training of a reward or cost model on preference pairs."""

    rm: ScoreModelConfig = ScoreModelConfig()
    """The score model to train."""


class DirectPreferenceConfig(Section):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: float = Field(default=0.1, gt=0)
    """Scale of the implicit reward: an answer's is beta * (log pi - log pi_reference)."""

    nll: float = Field(default=0.0, ge=0)
    """Factor of the mean negative log-likelihood per token of the chosen answer, as in RPO (arXiv 2404.19733). 0: plain
    DPO."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """The reference model. Default: the initial policy; its log-probabilities are computed before the first step."""

    @model_validator(mode="after")
    def _check_reference(self) -> DirectPreferenceConfig:
        if self.reference.parallel is not None and self.reference.path is None:
            raise ValueError("reference.parallel needs reference.path: the default runs on the trainer's ranks")
        return self


class DpoConfig(PreferenceConfig):
    """`megarl dpo`: training of a policy on preference pairs, without a reward model."""

    dpo: DirectPreferenceConfig = DirectPreferenceConfig()
    """Loss and reference model of DPO."""
