"""The run summary."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megarl.tracking.summary import RunSummary


def test_summary_is_valid_json(tmp_path: Path) -> None:
    RunSummary(
        eval_before=0.35,
        eval_after=None,
        steps=40,
        steps_planned=50,
        seconds_total=61.5,
        seconds_by_phase={"rollout": 30.0, "train": math.nan},
        tokens_per_second=1234.5,
        weight_sync_bytes=80_000_000,
        logprob_abs_max=math.inf,
    ).write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: 1 / 0) == {
        "eval_before": 0.35,
        "eval_after": None,
        "steps": 40,
        "steps_planned": 50,
        "seconds_total": 61.5,
        "seconds_by_phase": {"rollout": 30.0, "train": None},
        "tokens_per_second": 1234.5,
        "weight_sync_bytes": 80_000_000,
        "logprob_abs_max": None,
    }
