from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from megarl.config.section import Section, by_type


class RewardTerm(Section):
    """Fields that every reward shares."""

    weight: float = 1.0
    """Factor in the weighted sum of rewards."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """A reward that takes longer on one trajectory ends the run with an error."""


class NumericRewardConfig(RewardTerm):
    r"""1.0 where the completion's final number equals the reference (`#### N` or `\boxed{N}`), else 0.0."""

    type: Literal["numeric"] = "numeric"

    strict: bool = False
    """Accept only a completion that ended itself and whose text ends in exactly `#### <answer>`."""


class FormatRewardConfig(RewardTerm):
    """1.0 where the completion matches a regular expression, else 0.0."""

    type: Literal["format"]

    pattern: str = r"####\s*\S+\s*$"


class PythonRewardConfig(RewardTerm):
    """A function of yours, sync or async: `(trajectory, text, row) -> float`."""

    type: Literal["python"]

    path: str
    """`package.module:function`."""


RewardConfig = Annotated[
    Annotated[NumericRewardConfig, Tag("numeric")]
    | Annotated[FormatRewardConfig, Tag("format")]
    | Annotated[PythonRewardConfig, Tag("python")],
    by_type("numeric"),
]


class RewardsConfig(Section):
    """What a trajectory is worth: the weighted sum of its terms."""

    terms: dict[str, RewardConfig] = Field(default={"accuracy": NumericRewardConfig()}, min_length=1)
    """Name -> reward. Each is logged as `reward/<name>`."""

    eval_term: str | None = None
    """The term that evaluation reports. Default: the first."""

    @model_validator(mode="after")
    def _eval_term_exists(self) -> RewardsConfig:
        if self.eval_term is not None and self.eval_term not in self.terms:
            raise ValueError(f"eval_term needs one of {sorted(self.terms)}, got {self.eval_term!r}")
        return self

    @property
    def eval_name(self) -> str:
        """The term that evaluation reports."""
        return self.eval_term or next(iter(self.terms))
