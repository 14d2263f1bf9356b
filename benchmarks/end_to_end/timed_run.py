"""What is measured in one run of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """The counted steps of one run."""

    seconds: tuple[float, ...]
    """Wall-clock time of each step, from its first prompt to the end of its second update or weight sync."""
    lengths: tuple[int, ...]
    """Number of sampled tokens of each completion of these steps, the end token included."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of a step by phase; empty for a trainer that does not report them."""
    processor_seconds: Mapping[str, float] = field(default_factory=dict)
    """Mean CPU seconds of a step by kind of process; empty for a trainer that is not measured."""
