"""Formats the comparison as a table for the terminal or a Markdown file."""

from __future__ import annotations

from benchmarks.async_agents.compare import MAX_REWARD_DIFFERENCE, MIN_RATIO, Comparison
from benchmarks.async_agents.run import ScheduleReport
from benchmarks.text_table import markdown_rows, print_rows

INTRODUCTION = """\
# Asynchronous steps of an agent that waits for its tool

Measured on a node with {cores} CPU cores:

```
{command}
```

`yaml/agents/calculator.yaml` with a latency of its tool: log-normal, {latency_seconds:g} s on average, with sigma
{latency_sigma:g}. A step is {prompts_per_step} groups of {group_size} episodes, few enough that it waits for the tool
rather than for the cores, which one trainer rank and one engine share: where computing dominates, both schedules take
as long as the cores need. The two runs have the same model, seed, prompts, latencies of an episode, {steps} steps, and
learning rate, which decays linearly from {learning_rate:g}. The asynchronous one has `schedule.type: async` with
`lookahead: {lookahead}` and, by default, corrects for the age of its samples (`rollout_is`).

- `steps/s`: over the time of all steps, from the first prompt to the last push. `waiting`, `training`: seconds a step.
- `held out`: mean reward of {eval_samples} samples of each held-out problem after the last step. `sampled`: of the
  episodes of the last {last_steps} steps.
- `CPU`: CPU seconds of the run's processes in a step. `others`: of all other processes of the machine, Ray's own
  included. Where others use much, the times are not those of a quiet machine.

"""
COLUMNS = ("schedule", "steps/s", "held out", "sampled", "mean staleness", "waiting", "training", "CPU", "others")


def print_table(comparison: Comparison) -> None:
    """Print the runs, and the ratio of their speeds."""
    print_rows(COLUMNS, map(_cells, (comparison.sync, comparison.asynchronous)), 1)
    print(_line(comparison))


def markdown(comparison: Comparison) -> str:
    """Return the runs as a Markdown table, and the ratio of their speeds."""
    table = markdown_rows(COLUMNS, map(_cells, (comparison.sync, comparison.asynchronous)), 1)
    return f"{table}\n{_line(comparison)}\n"


def _cells(report: ScheduleReport) -> list[str]:
    return [
        report.schedule,
        f"{report.steps_per_second:.3f}",
        f"{report.held_out:.3f}",
        f"{report.sampled:.3f}",
        f"{report.mean_staleness:.2f}",
        f"{report.waiting_seconds:.2f}",
        f"{report.training_seconds:.2f}",
        f"{report.own_cpu_seconds:.2f}",
        f"{report.other_cpu_seconds:.2f}",
    ]


def _line(comparison: Comparison) -> str:
    return (
        f"Asynchronous steps per second over synchronous ones: {comparison.ratio:.2f} (target: at least {MIN_RATIO}). "
        f"Difference of the held-out rewards: {comparison.reward_difference:+.3f} (target: at most "
        f"{MAX_REWARD_DIFFERENCE})."
    )
