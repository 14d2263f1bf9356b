"""The section `reward`: reward terms and their weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, field_validator, model_validator

from megarl.config.reward_code import CodeRewardConfig
from megarl.config.reward_services import HttpRewardConfig, JudgeRewardConfig
from megarl.config.reward_term import RewardTerm, RuleConfig
from megarl.config.section import FilePath, Section, discriminate_by_type
from megarl.config.trainer import ParallelConfig

RESERVED_NAMES = frozenset({"mean", "informative_groups", "sampled_mean", "dropped"})
"""Metrics `reward/<name>` that are not the mean of a term."""

TERM_METRICS = ("failed", "retried", "share", "weight", "seconds_mean", "seconds_max", "length_correlation")
"""Metrics `reward/<term>/<key>` of every term; no further value of a reward can have their keys."""


class NumericRewardConfig(RewardTerm):
    r"""1.0 if the completion's final number equals the reference (`#### N` or `\boxed{N}`), else 0.0.

    Each reference needs to be a number; `math` has other answers, too.
    """

    type: Literal["numeric"] = "numeric"

    strict: bool = False
    """Accept only completions that end with a stop token and whose text ends in exactly `#### <answer>`."""


class MathRewardConfig(RuleConfig):
    r"""1.0 if the completion's final answer (`#### N` or `\boxed{N}`) equals the reference, else 0.0.

    Answers are numbers, expressions, sets, intervals, tuples, matrices, equations, inequalities, words or letters of a
    multiple choice. The share of answers whose comparison took too much time or memory, which score 0, is logged as
    `reward/<term>/undecided`.
    """

    type: Literal["math"]

    cpu_seconds: float = Field(default=1.0, gt=0)
    """CPU time in seconds for the comparison of two expressions. One that needs more scores 0."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    """Wall time in seconds after which the process that compares is taken for hung and restarted."""


class FormatRewardConfig(RuleConfig):
    """1.0 if the completion matches a regular expression, else 0.0."""

    type: Literal["format"]

    pattern: str = r"####\s*\S+\s*$"
    """Regular expression in the syntax of the package `regex` (that of `re`, and more), searched for anywhere in the
    text. Default: the text ends in `#### <answer>`."""


class PythonRewardConfig(RuleConfig):
    """A function of the user `(trajectory, text, row, **kwargs) -> float`, or a class with such a method `score`.

    Both may be async. Instead of a float, they may return a mapping with the key `reward`; its other entries are logged
    as `reward/<term>/<key>`.
    """

    type: Literal["python"]

    path: str
    """Import path of the function or class: `package.module:name`. A class is created once in each rollout worker; its
    method `close()`, if it has one, is called when the worker ends."""

    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the function, or of the constructor of the class."""

    per: Literal["sample", "group"] = "sample"
    """`group`: called once for all completions of a prompt, as `(trajectories, texts, row) -> sequence` with one result
    per completion. In evaluation a group has one completion."""


class EnvironmentRewardConfig(RewardTerm):
    """Sum of the rewards that the environment (`rollout.env`) has given in the episode's steps."""

    type: Literal["environment"]


class ModelRewardConfig(RewardTerm):
    """Score of a reward model. The model is loaded for training only: the term takes no part in evaluation."""

    type: Literal["model"]

    path: FilePath
    """Folder in Hugging Face format of a sequence classification model with one label, or a hub id as in
    `model.path`."""

    parallel: ParallelConfig | None = None
    """Parallel sizes of the model. Default: those of `trainer.parallel`."""


AnyRuleConfig = (
    NumericRewardConfig
    | MathRewardConfig
    | FormatRewardConfig
    | PythonRewardConfig
    | EnvironmentRewardConfig
    | CodeRewardConfig
    | HttpRewardConfig
    | JudgeRewardConfig
)

RewardConfig = Annotated[
    Annotated[NumericRewardConfig, Tag("numeric")]
    | Annotated[MathRewardConfig, Tag("math")]
    | Annotated[FormatRewardConfig, Tag("format")]
    | Annotated[PythonRewardConfig, Tag("python")]
    | Annotated[EnvironmentRewardConfig, Tag("environment")]
    | Annotated[CodeRewardConfig, Tag("code")]
    | Annotated[HttpRewardConfig, Tag("http")]
    | Annotated[JudgeRewardConfig, Tag("judge")]
    | Annotated[ModelRewardConfig, Tag("model")],
    discriminate_by_type("numeric"),
]


class RewardsConfig(Section):
    """The reward of a completion: the weighted sum of its terms."""

    terms: dict[str, RewardConfig] = Field(default={"accuracy": NumericRewardConfig()}, min_length=1)
    """Name -> reward term. Each is logged as `reward/<name>`. Default: `accuracy`, of type `numeric`."""

    @field_validator("terms")
    @classmethod
    def _check_names(cls, terms: dict[str, RewardConfig]) -> dict[str, RewardConfig]:
        for name in terms:
            if name in RESERVED_NAMES or "/" in name:
                raise ValueError(
                    f"a term needs a name without / that is none of {', '.join(sorted(RESERVED_NAMES))}, which are "
                    f"metrics of all terms, got {name!r}"
                )
        return terms

    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """Largest share of a step's completions that one term, or the environment, may fail on (`on_error: drop`). A step
    with more failures ends the run with the name of the term and its first error. 1: no limit."""

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
    def environments(self) -> list[str]:
        """Names of the terms that are rewards of an environment's steps."""
        return [name for name, term in self.terms.items() if isinstance(term, EnvironmentRewardConfig)]

    @property
    def models(self) -> dict[str, ModelRewardConfig]:
        """Name -> term, of the terms that are reward models."""
        return {name: term for name, term in self.terms.items() if isinstance(term, ModelRewardConfig)}

    @property
    def eval_name(self) -> str:
        """Name of the term that evaluation reports. Only valid if `data.eval_path` is set: then there is a rule."""
        return self.eval_term or self.rules[0]
