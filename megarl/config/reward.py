"""The section `reward`: reward terms and their weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from megarl.config.section import Section, discriminate_by_type
from megarl.config.trainer import ParallelConfig


class RewardTerm(Section):
    """Fields of every reward term."""

    weight: float = 1.0
    """Factor of the term in the sum. 0: the term is only logged."""


class RuleConfig(RewardTerm):
    """Fields of a rule: a reward that rollout workers compute from a completion's text."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """Timeout in seconds for one completion; a reward that takes longer ends the run with an error."""


class NumericRewardConfig(RuleConfig):
    r"""1.0 if the completion's final number equals the reference (`#### N` or `\boxed{N}`), else 0.0."""

    type: Literal["numeric"] = "numeric"

    strict: bool = False
    """Accept only completions that end with a stop token and whose text ends in exactly `#### <answer>`."""


class FormatRewardConfig(RuleConfig):
    """1.0 if the completion matches a regular expression, else 0.0."""

    type: Literal["format"]

    pattern: str = r"####\s*\S+\s*$"
    """Regular expression, searched for anywhere in the text. Default: the text ends in `#### <answer>`."""


class PythonRewardConfig(RuleConfig):
    """A user-defined function, sync or async: `(trajectory, text, row) -> float`."""

    type: Literal["python"]

    path: str
    """Import path of the function: `package.module:function`."""


class ModelRewardConfig(RewardTerm):
    """Score of a reward model. The model is loaded for training only: the term takes no part in evaluation."""

    type: Literal["model"]

    path: str
    """Folder in Hugging Face format of a sequence classification model with one label."""

    parallel: ParallelConfig | None = None
    """Parallel sizes of the model. Default: those of `trainer.parallel`."""


RewardConfig = Annotated[
    Annotated[NumericRewardConfig, Tag("numeric")]
    | Annotated[FormatRewardConfig, Tag("format")]
    | Annotated[PythonRewardConfig, Tag("python")]
    | Annotated[ModelRewardConfig, Tag("model")],
    discriminate_by_type("numeric"),
]


class RewardsConfig(Section):
    """The reward of a completion: the weighted sum of its terms."""

    terms: dict[str, RewardConfig] = Field(default={"accuracy": NumericRewardConfig()}, min_length=1)
    """Name -> reward term. Each is logged as `reward/<name>`. Default: `accuracy`, of type `numeric`."""

    eval_term: str | None = None
    """Name of the term that evaluation reports. It needs to be a rule, not a model. Default: the first rule."""

    @model_validator(mode="after")
    def _check_eval_term(self) -> RewardsConfig:
        if self.eval_term is None:
            return self
        if self.eval_term not in self.terms:
            raise ValueError(f"eval_term needs to be one of {sorted(self.terms)}, got {self.eval_term!r}")
        if self.eval_term not in self.rules:
            raise ValueError(
                f"eval_term needs to be a rule, got {self.eval_term!r}, which is a model: evaluation does not load "
                "reward models"
            )
        return self

    @property
    def rules(self) -> list[str]:
        """Names of the terms that are rules, which rollout workers compute."""
        return [name for name, term in self.terms.items() if not isinstance(term, ModelRewardConfig)]

    @property
    def models(self) -> dict[str, ModelRewardConfig]:
        """Name -> term, of the terms that are reward models."""
        return {name: term for name, term in self.terms.items() if isinstance(term, ModelRewardConfig)}

    @property
    def eval_name(self) -> str:
        """Name of the term that evaluation reports. Only valid if `data.eval_path` is set: then there is a rule."""
        return self.eval_term or self.rules[0]
