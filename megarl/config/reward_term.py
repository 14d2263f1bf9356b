"""Fields that reward terms of several types have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class RewardTerm(Section):
    """Fields of every reward term."""

    weight: float = 1.0
    """Factor of the term in the sum. 0: the term is only logged."""


class RuleConfig(RewardTerm):
    """Fields of a rule: a reward that rollout workers compute, without a reward model."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """Timeout in seconds for one completion, or for one group with `per: group`."""

    on_error: Literal["drop", "raise"] = "drop"
    """What to do with a completion on which the term fails twice: it raises an exception, takes longer than
    `timeout_seconds` or returns no finite number, and fails again when it is called once more. `drop`: leave the
    completion out of the step, so that it counts neither for baselines and metrics nor for the loss. `raise`: end the
    run. Default: `drop`, because a failure is no judgement of the completion, and one among thousands should not end a
    run; a term with a defect fails on many, and then `reward.max_failed_share` ends the run."""
