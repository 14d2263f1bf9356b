"""Formats reports as tables for the terminal or a Markdown file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.staleness.demo import DemoReport
from benchmarks.staleness.toy import ToyReport
from benchmarks.text_table import markdown_rows, print_rows

_TOY = """\
# Reward by the age of samples: a small policy

```
{command}
```

A policy of 32 weights is trained on sequences of three tokens with megarl's GRPO loss, one update of Adam a step, on
samples of the version N updates before. "reward" is the mean over five problems at the end of training, "worst seed"
that of one of them, "of fresh" the reward divided by that at staleness 0. The learning rate is one at which fresh
samples train well and stale ones without a correction do not.

"""
_DEMO = """\
# Reward by the age of samples: the demo

Measured on a node with {cores} CPU cores:

```
{command}
```

`yaml/demo.yaml` with `schedule.type: async`, `adapt_lookahead: false`, and `lookahead` and `max_staleness` of the
staleness; `sync` for 0.
"accuracy" is that of the held-out problems after 40 steps, "mean staleness" that of the tokens trained on, as a mean
over the steps, and "ess" the smallest `drift/ess` of a step. Without training the accuracy is 0.33.

"""
INTRODUCTIONS: Mapping[bool, str] = {False: _TOY, True: _DEMO}
"""By whether the demo was run."""
TOY_COLUMNS = ("correction", "staleness", "reward", "worst seed", "of fresh")
DEMO_COLUMNS = ("correction", "staleness", "accuracy", "mean staleness", "worst staleness", "ess")

Reports = Sequence[ToyReport | DemoReport]


def print_table(reports: Reports) -> None:
    """Print the reports, all of one kind."""
    print_rows(_columns(reports), map(_cells, reports), 1)


def markdown(reports: Reports) -> str:
    """Return the reports, all of one kind, as a Markdown table."""
    return markdown_rows(_columns(reports), map(_cells, reports), 1)


def _columns(reports: Reports) -> Sequence[str]:
    return TOY_COLUMNS if isinstance(reports[0], ToyReport) else DEMO_COLUMNS


def _cells(report: ToyReport | DemoReport) -> list[str]:
    if isinstance(report, ToyReport):
        name, age = report.correction, report.staleness
        return [name, str(age), f"{report.reward:.3f}", f"{report.reward_min:.3f}", f"{report.over_fresh:.3f}"]
    return [
        "default" if report.corrected else "none",
        str(report.max_staleness),
        f"{report.accuracy:.3f}",
        f"{report.mean_staleness:.2f}",
        str(report.worst_staleness),
        "-" if report.min_ess is None else f"{report.min_ess:.3f}",
    ]
