"""The demo as an asynchronous run: held-out accuracy by the staleness of the samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.prepare import prepare_demo
from benchmarks.mismatch.measure import read_rows
from megarl.config import RunConfig, load_config
from megarl.errors import WorkerError

RECIPE = Path("yaml/demo.yaml")
MIN_ACCURACY = {0: 0.82, 1: 0.82, 2: 0.82, 4: 0.82, 8: 0.77}
"""Held-out accuracy that a corrected run reaches at least, by staleness."""
MIN_ESS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """One run."""

    max_staleness: int
    """`schedule.max_staleness` and `lookahead`; 0: `schedule.type: sync`."""
    corrected: bool
    """Whether the default correction applies; else `algorithm.rollout_is` is null."""
    accuracy: float
    """On held-out problems, after the last step."""
    mean_staleness: float
    """Of the tokens trained on, mean over the steps. Below `max_staleness` where training waits for the engines."""
    worst_staleness: int
    min_ess: float | None
    """Smallest effective sample size of a step, as a share; None where no token is of an older version."""
    seconds: float
    """Time of all steps."""

    @property
    def reaches_target(self) -> bool:
        """Whether a corrected run is as accurate as it needs to be; there is no target without a correction."""
        if not self.corrected or self.max_staleness not in MIN_ACCURACY:
            return True
        return self.accuracy >= MIN_ACCURACY[self.max_staleness] and (self.min_ess is None or self.min_ess >= MIN_ESS)


def demo_paths(folder: Path, model: Path | None, data: Path | None, notify: Callable[[str], None]) -> list[str]:
    """Return overrides with the paths of the fine-tuned model and the data; what is missing is made in `folder`.

    Args:
        model: folder of the fine-tuned model; None: that of the recipe.
        data: folder with train.jsonl and heldout.jsonl; None: that of the recipe.
    """
    given = [f"model.path={model}"] if model is not None else []
    if data is not None:
        given += [f"data.path={data}/train.jsonl", f"data.eval_path={data}/heldout.jsonl"]
    if (folder / "demo/sft/model").exists():  # of an earlier call
        made = folder / "demo"
        paths = [f"model.path={made}/sft/model", f"data.path={made}/data/train.jsonl"]
        return [*paths, f"data.eval_path={made}/data/heldout.jsonl", *given]
    config = load_config(RunConfig, RECIPE, given)
    return [*prepare_demo(config, folder / "demo", notify), *given]


def run_demo(
    folder: Path, max_staleness: int, *, corrected: bool, overrides: Sequence[str], notify: Callable[[str], None]
) -> DemoReport:
    """Run the demo, or read the run that an earlier call has left in `folder`.

    Raises:
        WorkerError: the run failed.
    """
    run_dir = folder / f"staleness-{max_staleness}-{'corrected' if corrected else 'uncorrected'}"
    if not (run_dir / "summary.json").exists():
        notify(f"{run_dir.name}: running")
        settings = [f"run_dir={run_dir}", f"export_dir={run_dir}/model", *overrides]
        if max_staleness:
            staleness = [f"schedule.{key}={max_staleness}" for key in ("lookahead", "max_staleness")]
            settings += ["schedule.type=async", "schedule.adapt_lookahead=false", *staleness]
        if not corrected:
            settings.append("algorithm.rollout_is=null")
        command = [str(Path(sys.executable).with_name("megarl")), "train", str(RECIPE), "--set", *settings]
        ended = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise WorkerError(f"{run_dir.name} ended with exit code {ended.returncode}:\n{ended.stderr[-2000:]}")
    report = read_run(run_dir, max_staleness, corrected=corrected)
    notify(f"{run_dir.name}: accuracy {report.accuracy:.3f} after {report.seconds:.0f} s")
    return report


def read_run(run_dir: Path, max_staleness: int, *, corrected: bool) -> DemoReport:
    """Return the report of a finished run."""
    steps = [row for row in read_rows(run_dir) if "loss" in row]
    ess = [row["drift/ess"] for row in steps if "drift/ess" in row]
    return DemoReport(
        max_staleness=max_staleness,
        corrected=corrected,
        accuracy=json.loads((run_dir / "summary.json").read_text())["eval_after"],
        mean_staleness=sum(row.get("staleness/mean", 0.0) for row in steps) / len(steps),
        worst_staleness=int(max(row.get("staleness/max", 0.0) for row in steps)),
        min_ess=min(ess, default=None),
        seconds=sum(row["time/step_seconds"] for row in steps),
    )
