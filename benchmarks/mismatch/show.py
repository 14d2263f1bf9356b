"""Formats reports as tables for the terminal or a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from benchmarks.mismatch.measure import MismatchReport
from benchmarks.text_table import markdown_rows, print_rows

INTRODUCTION = """\
# Trainer and engine log-probabilities in bfloat16

Measured on a node with {cores} CPU cores; trainer and engines compute in {dtype}:

```
{command}
```

The log-probabilities of the sampled tokens are compared before each step's first update. "kl" is the KL divergence of
the engine's distribution from the trainer's (k3), "p99" the 99 % quantile of the absolute differences: smallest and
largest value of the run's steps. "of limit" is the largest ratio of a step's value to the bound that it has by default
(`limits.logprob_kl`, `limits.logprob_abs_p99`): above 1 the run stops.

"""
RECIPES_TITLE = """\
## Recipes

Forty steps with the default limits. Fine-tuning recipes whose model a later recipe uses run all of their steps.
Stages without engines have no difference to measure.

"""
FAMILIES_TITLE = """
## Model families

Random models with four layers, whose final norm is scaled so that the entropy is far from that of the uniform
distribution over 320 tokens (5.8 nats); twelve steps of 64 samples. "rounding kl" is the KL divergence of the model in
{dtype} from the same model in float32, both computed by transformers on random tokens: what rounding alone does to one
side. "R3" is `trainer.moe.router_replay: R3`; R2 replays the trainer's own choices from the first pass on, so that it
does not change this difference.

"""
RECIPE_COLUMNS = ("recipe", "changes", "ended", "steps", "entropy", "kl", "of limit", "p99", "of limit")
FAMILY_COLUMNS = ("family", "changes", "ended", "steps", "entropy", "kl", "of limit", "p99", "of limit", "rounding kl")


def markdown(recipes: Sequence[MismatchReport], families: Sequence[MismatchReport]) -> str:
    """Return both tables in Markdown."""
    dtype = (*recipes, *families)[0].dtype
    return (
        RECIPES_TITLE
        + markdown_rows(RECIPE_COLUMNS, map(_row, recipes), 3)
        + FAMILIES_TITLE.format(dtype=dtype)
        + markdown_rows(FAMILY_COLUMNS, map(_family_row, families), 3)
    )


def print_tables(recipes: Sequence[MismatchReport], families: Sequence[MismatchReport]) -> None:
    """Print both tables to stdout."""
    print_rows(RECIPE_COLUMNS, map(_row, recipes), 3)
    print_rows(FAMILY_COLUMNS, map(_family_row, families), 3)


def _row(report: MismatchReport) -> list[str]:
    ended = "stopped by its limit" if report.stopped_by else "all steps"
    entropy = f"{mean(report.entropy):.2f}" if report.entropy else "-"
    row = [report.name, report.difference or "none", ended, str(report.steps), entropy]
    for key in ("logprob_kl", "logprob_abs_p99"):
        if key in report.mismatch:
            values = report.mismatch[key]
            row += [
                f"{min(values):.1e} to {max(values):.1e} (median {median(values):.1e})",
                f"{report.share_of_limit(key):.2f}",
            ]
        else:
            row += ["no engine", "-"]
    return row


def _family_row(report: MismatchReport) -> list[str]:
    return [*_row(report), "-" if report.rounding_kl is None else f"{report.rounding_kl:.1e}"]
