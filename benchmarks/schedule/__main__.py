"""Compares schedules: step time, staleness and waste, simulated or with processes that sleep.

python -m benchmarks.schedule --simulate --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.results_file import write_results
from benchmarks.schedule.accounts import Report
from benchmarks.schedule.cases import CASES
from benchmarks.schedule.show import markdown, print_table
from benchmarks.schedule.simulate import simulate
from benchmarks.schedule.workload import TAILS, Workload
from benchmarks.text_table import markdown_rows
from megarl.errors import ConfigError, MegarlError

INTRODUCTION = """\
# Schedules compared: step time, staleness and waste

```
{command}
```

{method}
Generation with all slots busy takes 1, and training {train:g}; the larger is the bound of a step. A push stops both for
{pause}. A group is {group_size} samples, a step {groups_per_step} groups. Lengths are log-normal: `moderate` with sigma
0.8, cut at 5 times the mean; `heavy` with sigma 1, cut at 20 times. The engines have slots for half the samples of a
step, or for a quarter. The first fifth of the {steps} steps does not count.

- `worst staleness`, `mean`: of the tokens trained on, in versions. `mean of groups`: by the oldest token of
  each group.
- `wasted`: tokens of discarded groups. `masked`: tokens of the batches above the cap, which are left out.
- `W`, `W max`: time from a group's admission to its last sample, in steps, mean and maximum.
- `trained / admitted length`: mean length of the groups trained on, divided by that of the admitted ones. `open`:
  groups left at the end.
- `adapts` is `adapt_lookahead: true`. `count gate` limits the number of open groups and nothing else; `drop` discards
  groups above the cap.

"""
SIMULATED = "Simulated: the state machine of `megarl/run/schedule` drives engines and a trainer that are numbers."
SCRIPTED = """\
Ray processes: the state machine of `megarl/run/schedule` drives an engine and a trainer, which sleep
{seconds:g} s a step with all slots busy. The same groups are also simulated. The driver used at most {cpu:.1%}
of a CPU core."""
EVENTS = """\
# CPU time of the events of a schedule

```
{command}
```

{cores} cores. Microseconds of the controller's thread, mean of ten steps.

- `by_deadline_event_us`, `in_order_event_us`: an event of the state machine and the look for a batch after it.
- `group_us`: all that a run does for a group that a stream returns at once: it is admitted, received, judged by a
  filter, leased and pushed, and its events are written to the log.

"""
NUM_OPEN = 10_000
"""Open groups of the measurement of an event's cost."""


def main() -> int:
    """Print the reports to stdout."""
    args = _parser().parse_args()
    if args.steps is None:
        args.steps = 2000 if args.lengths else 200
    try:
        if args.events:
            return _print_event_cost(args)
        workload = _workload(args)
        method = SIMULATED
        if args.processes:
            reports, cpu_fraction = _processes(args, workload)
            method = SCRIPTED.format(seconds=args.step_seconds, cpu=cpu_fraction)
        else:
            reports = list(_simulations(args, workload))
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not args.json:
        print_table(reports)
    if args.write:
        write_results(
            args.write,
            INTRODUCTION,
            markdown(reports),
            module="benchmarks.schedule",
            method=method,
            pause=workload.pause_seconds,
            train=workload.train_seconds,
            group_size=workload.group_size,
            groups_per_step=workload.groups_per_step,
            steps=workload.num_steps,
        )
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    for name in ("steps", "groups_per_step", "group_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} needs at least 1, got {getattr(args, name)}")
    if args.train_seconds <= 0:
        raise ConfigError(f"--train-seconds needs to be above 0, got {args.train_seconds:g}")
    return Workload(
        tail=TAILS["moderate"],
        groups_per_step=args.groups_per_step,
        group_size=args.group_size,
        num_steps=args.steps,
        train_seconds=args.train_seconds,
        seed=args.seed,
    )


def _simulations(args: argparse.Namespace, workload: Workload) -> Iterator[Report]:
    for tail in args.tails:
        for schedule in args.schedules:
            report = simulate(CASES[schedule], replace(workload, tail=TAILS[tail])).report(tail, schedule)
            _print_json(args.json, asdict(report))
            yield report


def _processes(args: argparse.Namespace, workload: Workload) -> tuple[list[Report], float]:
    """Return the reports of processes and of their simulation, and the largest share of a core that a driver used."""
    from benchmarks.local_ray import local_ray
    from benchmarks.schedule.processes import ScriptedRun

    reports, cpu_fractions = [], [0.0]
    with local_ray(num_cpus=2):
        for tail, schedule in product(args.tails, args.schedules):
            same = replace(workload, tail=TAILS[tail])
            run = ScriptedRun(case=CASES[schedule], workload=same, step_seconds=args.step_seconds).run()
            report = run.accounts.report(tail, schedule)
            simulated = simulate(CASES[schedule], same).report(tail, schedule)
            facts = {
                "simulated_step_over_bound": simulated.step_over_bound,
                "controller_cpu_fraction": round(run.cpu_fraction, 5),
            }
            _print_json(args.json, asdict(report) | facts)
            cpu_fractions.append(run.cpu_fraction)
            reports += [report, replace(simulated, schedule=f"{schedule}, simulated")]
    return reports, max(cpu_fractions)


def _print_event_cost(args: argparse.Namespace) -> int:
    from benchmarks.schedule.event_cost import event_microseconds, group_microseconds

    cost = {
        f"{order}_event_us": round(event_microseconds(NUM_OPEN, num_steps=10, in_order=order == "in_order"), 2)
        for order in ("by_deadline", "in_order")
    }
    cost["group_us"] = round(group_microseconds(NUM_OPEN, num_steps=10), 2)
    if args.json:
        print(json.dumps({"open_groups": NUM_OPEN, **cost}))
    else:
        print("\n".join(f"{name} with {NUM_OPEN} open groups: {value} us" for name, value in cost.items()))
    if args.write:
        table = markdown_rows(("open groups", *cost), [[str(NUM_OPEN), *map(str, cost.values())]], 0)
        write_results(args.write, EVENTS, table, module="benchmarks.schedule")
    return 0


def _print_json(as_json: bool, report: dict[str, Any]) -> None:
    if as_json:
        print(json.dumps(report), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.schedule", description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--simulate", action="store_true", help="simulate engines and trainer; the default")
    mode.add_argument("--lengths", action="store_true", help="simulate ten times as many steps, for exact mean lengths")
    mode.add_argument("--processes", action="store_true", help="run Ray processes that sleep, and the same simulated")
    mode.add_argument("--events", action="store_true", help="measure the CPU time of an event and of a group")
    parser.add_argument("--tails", nargs="+", default=list(TAILS), choices=list(TAILS), metavar="TAIL")
    parser.add_argument("--schedules", nargs="+", default=list(CASES), choices=list(CASES), metavar="SCHEDULE")
    parser.add_argument("--steps", type=int, help="number of steps; default: 200, with --lengths 2000")
    parser.add_argument("--groups-per-step", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--train-seconds", type=float, default=1.0, help="time of a training step; that of generation is 1"
    )
    parser.add_argument("--step-seconds", type=float, default=5.0, help="time of a phase with --processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
