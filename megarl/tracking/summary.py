"""A run in one small file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.process.atomic_files import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run comes to that has ended in order."""

    eval_before: float | None
    """Mean of the evaluated reward term before the first step; None where nothing was held out."""
    eval_after: float | None
    """The same after the last step; None where the run was asked to end there and no evaluation was due."""
    steps: int
    """Optimizer steps of the algorithm, that is, batches of prompts."""
    steps_planned: int
    """More than `steps` where the run was asked to end early."""
    seconds_total: float
    seconds_by_phase: Mapping[str, float]
    tokens_per_second: float
    """Tokens of the trained trajectories, prompts included, over the time of all steps."""
    weight_sync_bytes: int
    """Bytes of weights sent to the engines, all steps together."""
    logprob_abs_max: float | None
    """The largest difference between engine's and trainer's log-probability of a token, by the same weights."""

    def write(self, path: str | Path) -> None:
        """Write it as a JSON object, whole or not at all; numbers that are not finite become null."""
        text = json.dumps(_finite(dataclasses.asdict(self)), indent=2, allow_nan=False)
        with replaced(Path(path)) as draft:
            draft.write_text(text + "\n")


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {k: _finite(v) for k, v in value.items()}
        case _:
            return value
