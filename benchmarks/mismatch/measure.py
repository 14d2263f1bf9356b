"""Runs configurations with `megarl`, and reads the mismatch of trainer and engine from their metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.config.limits import AUTO_LIMITS
from megarl.errors import MegarlError
from megarl.megatron.requests import MISMATCH_METRICS

METRICS = {key: MISMATCH_METRICS[key] for key in ("logprob_kl", "logprob_abs_p99", "logprob_abs_max")}


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    """The steps of a run."""

    name: str
    difference: str
    """What differs from the recipe."""
    dtype: str
    steps: int
    mismatch: Mapping[str, Sequence[float]]
    """Values of each step by limit, empty without engines."""
    entropy: Sequence[float]
    """Mean entropy of the policy in each step."""
    stopped_by: str
    """The message of the limit that ended the run; empty if it has done all steps."""
    rounding_kl: float | None = None
    """KL divergence of the model in this dtype from the same in float32, both computed by transformers."""

    def share_of_limit(self, key: str) -> float:
        """Return the largest ratio of a step's value to the bound that an `auto` limit has in that step."""
        values, auto = self.mismatch[key], AUTO_LIMITS[self.dtype][key]
        return max(value / auto.bound(values[:step]) for step, value in enumerate(values))

    def write(self, file: Path) -> None:
        """Write the report as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, file: Path) -> MismatchReport:
        """Read a report that `write` has written."""
        return cls(**json.loads(file.read_text()))


def run_megarl(
    command: str, config: str, overrides: Mapping[str, object], *, folder: Path, python_path: Sequence[Path] = ()
) -> str:
    """Run `megarl COMMAND CONFIG --set ...` in `folder`; return the message of the limit that ended it, or "".

    Raises:
        MegarlError: the command failed otherwise.
    """
    changes = [f"{key}={value}" for key, value in overrides.items()]
    path = os.pathsep.join(filter(None, [*map(str, python_path), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [Path(sys.executable).with_name("megarl"), command, config, *(["--set", *changes] if changes else [])],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode not in (0, 3):
        raise MegarlError(f"megarl {command} {config} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stderr.strip() if ended.returncode else ""


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make_report(run_dir: Path, *, name: str, dtype: str, stopped_by: str, difference: str = "") -> MismatchReport:
    """Return the report of a finished run; steps that do not train the policy have no mismatch."""
    rows = read_rows(run_dir)
    steps = [row for row in rows if "loss" in row]
    return MismatchReport(
        name=name,
        difference=difference,
        dtype=dtype,
        steps=max((row["step"] for row in rows), default=0),
        mismatch={
            key: [row[metric] for row in steps] for key, metric in METRICS.items() if steps and metric in steps[0]
        },
        entropy=[row["entropy"] for row in steps if "entropy" in row],
        stopped_by=stopped_by,
    )
