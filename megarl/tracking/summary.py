"""`summary.json`: the results of a finished run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.process.atomic_files import atomic_write


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The results of a run that has ended regularly."""

    eval_before: float | None
    """Mean of the evaluated reward term before the first step; None without held-out data."""
    eval_after: float | None
    """The same after the last step; None if the run was stopped early and no evaluation was due."""
    steps: int
    """Completed steps of the algorithm, one batch of prompts each."""
    steps_planned: int
    """Configured number of steps; more than `steps` if the run was stopped early."""
    seconds_total: float
    seconds_by_phase: Mapping[str, float]
    tokens_per_second: float
    """Tokens of the trained trajectories, including prompts, divided by the time of all steps."""
    weight_sync_bytes: int
    """Bytes of weights sent to the engines in all steps."""
    logprob_abs_max: float | None
    """Maximum absolute difference of a token's log-probability between engine and trainer at equal weights."""

    def write(self, path: str | Path) -> None:
        """Write the summary as a JSON object, atomically; numbers that are not finite become null."""
        text = json.dumps(_finite(dataclasses.asdict(self)), indent=2, allow_nan=False)
        with atomic_write(Path(path)) as draft:
            draft.write_text(text + "\n")


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {k: _finite(v) for k, v in value.items()}
        case _:
            return value
