"""Draw a metric of one or more runs against the step, as an SVG file that is readable on light and dark backgrounds.

python examples/plot_curve.py runs/demo runs/mine --metric reward/mean --out curve.svg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

GRAY = "#7a7a7a"
"""Text and axes: contrast above 4 on white and on dark pages (#0d1117)."""

COLORS = ("#2b7bba", "#c2571a", "#3a8a4d", "#9a62c7", "#c94f6d", "#7c7a1e")
"""Curves: contrast above 4 on white and on dark pages."""

LINES = ("-", "--", "-.", ":")
"""The line style differs too, for readers who cannot tell the colors apart."""

Curve = dict[int, float]
"""Values of a metric by step."""


class MetricError(ValueError):
    """A run has no metrics, or not the one to draw."""


def read_rows(run: Path) -> list[dict[str, float | None]]:
    """Return the rows of the run's metrics.jsonl; a last line that is still being written is left out.

    Raises:
        MetricError: there is no such file, or it has no complete line.
    """
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise MetricError(f"RUN_FOLDER needs the run_dir of a run, which has metrics.jsonl; there is no {file}")
    rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    if not rows:
        raise MetricError(f"{file} has no step yet")
    return rows


def read_curve(run: Path, metric: str) -> Curve:
    """Return the metric at the steps that have it; NaN where the run computed no finite number.

    Raises:
        MetricError: as in `read_rows`; or no step has the metric: the message lists those that exist.
    """
    rows = read_rows(run)
    curve = {int(row["step"] or 0): _number(row[metric]) for row in rows if metric in row}
    if not curve:
        names = sorted({name for row in rows for name in row} - {"step"})
        raise MetricError(f"{run / 'metrics.jsonl'} has no metric {metric}; it has:\n  " + "\n  ".join(names))
    return curve


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def label_runs(runs: Sequence[Path]) -> list[str]:
    """Return the names of the run folders, or their paths as given if two have the same name."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def draw(curves: Mapping[str, Curve], metric: str, out: Path) -> None:
    """Write the curves to the SVG file `out`; equal curves give equal bytes.

    Args:
        curves: label of the run -> its curve.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context():
        mpl.rcdefaults()  # a user's matplotlibrc does not matter
        mpl.rcParams.update({"svg.hashsalt": "megarl", "svg.fonttype": "none", "text.color": GRAY})
        mpl.rcParams.update({"axes.edgecolor": GRAY, "axes.labelcolor": GRAY})
        mpl.rcParams.update({"xtick.color": GRAY, "ytick.color": GRAY})
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.add_subplot()
        for i, (label, curve) in enumerate(curves.items()):
            steps, values = zip(*sorted(curve.items()), strict=True)
            marker = "o" if len(steps) <= 12 else ""
            axes.plot(
                steps,
                values,
                color=COLORS[i % len(COLORS)],
                linestyle=LINES[i % len(LINES)],
                marker=marker,
                label=label,
            )
        axes.set_xlabel("step")
        axes.set_ylabel(metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color=GRAY, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1:
            axes.legend(frameon=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what the command line asks for; return 0, or 2 after an error message."""
    parser = argparse.ArgumentParser(description="Draw a metric of one or more runs against the step.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER", help="run_dir of a run")
    parser.add_argument("--metric", required=True, metavar="NAME", help="metric in metrics.jsonl, such as reward/mean")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.svg", help="file to write")
    args = parser.parse_args(arguments)
    try:
        curves = {
            label: read_curve(run, args.metric) for label, run in zip(label_runs(args.runs), args.runs, strict=True)
        }
    except MetricError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    draw(curves, args.metric, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
