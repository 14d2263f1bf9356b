"""The completions of a prompt with their rewards, and how the reward terms were computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.batch.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TermReport:
    """How one reward term was computed on the completions of a group."""

    seconds: float
    """Time from the call of the term to its last value, calls after a failure included."""
    num_retried: int
    """Number of completions on which the first call failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The completions of a prompt with their rewards."""

    trajectories: list[Trajectory]
    terms: Mapping[str, TermReport] = field(default_factory=dict)
    """By name of the term."""
