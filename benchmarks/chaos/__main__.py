"""Kills random processes of a run at random times and compares the result with an undisturbed run.

python -m benchmarks.chaos --config yaml/demo.yaml --kills 20 --seed 0 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.chaos import compare as comparison
from benchmarks.chaos.command import Command
from benchmarks.chaos.disturb import POLL_SECONDS, FaultInjector
from benchmarks.chaos.plan import STEPS_PER_KILL, PlannedKill, plan_kills
from benchmarks.chaos.prepare import prepare_demo, read_config
from benchmarks.chaos.report import ChaosReport, make_report
from benchmarks.chaos.schedule import check_schedule, is_asynchronous
from benchmarks.chaos.show import markdown, print_table
from benchmarks.chaos.targets import ALL_TARGETS, DEFAULT_TARGETS
from benchmarks.chaos.watch import RunWatcher
from benchmarks.results_file import write_results
from megarl.cli.options import add_overrides
from megarl.controller.run_stage import rotate
from megarl.errors import ConfigError, MegarlError, WorkerError

EXPLANATION = """\
The same configuration and seed run twice: once undisturbed, once with kills (SIGKILL to a process id). --seed and the
phases of the undisturbed run determine times and targets; a tenth of the kills hit the run while it recovers from the
previous one. A kill counts as recovered once a step that began after it has finished (or the run has finished
successfully) without a restart of the command. A command that exits with an error is restarted with `--resume auto`.

Compared bitwise at the end:
{compared}
Generation is reproducible because finished rollouts are replayed from the run's journal and unfinished ones are
resampled with the same seeds: with SGLang's deterministic inference on CPUs, a completion depends only on its prompt
and seed.

An asynchronous run (`schedule.type: async`) does not repeat by itself. Its checkpoints are compared with those of a
replay of its journal, without engines, and its log says which groups were lost, trained twice, generated again after
they were finished, or trained above the staleness cap.

Orphans are processes still alive 15 s after the end of the run (70 s for Ray's two agents, which report a killed
cluster for 60 s), and new files in /dev/shm that no process has mapped. The exit code is 0 if all kills were made and
recovered from, both runs are equal, and there are no orphans; else 1.
"""


INTRODUCTION = """\
# A run whose processes are killed, compared with an undisturbed run

Measured on a node with {cores} CPU cores:

```
{command}
```

Each kill is a SIGKILL to one process at a random time. "Recovered": the run resumed without a restart of the command.
Recovery time is measured from the kill to the end of the first step that began after it; most of it is process startup.
"Bitwise equal": weights, optimizer, every other value of the last checkpoint, the exported model, the prompts of each
step, every trajectory and the metrics that depend only on training.

"""


def main() -> int:
    """Print one report to stdout and progress to stderr."""
    args = _parser().parse_args()
    console = Console(stderr=True)

    def notify(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        report = _run(args, notify)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        print_table(report)
    if args.write:
        write_results(args.write, INTRODUCTION, markdown(report), module="benchmarks.chaos")
    return 0 if report.is_clean else 1


def _run(args: argparse.Namespace, notify: Callable[[str], None]) -> ChaosReport:
    if args.kills < 1:
        raise ConfigError(f"--kills needs at least 1, got {args.kills}")
    work = args.work.absolute()
    settings = _settings(args)
    config = read_config(args.config, settings)
    if work.exists() and any(work.iterdir()):
        notify(f"{args.work} exists; moved to {rotate(work)}")
    work.mkdir(parents=True, exist_ok=True)
    arguments = ["train", str(args.config), "--set", *settings, *prepare_demo(config, work / "demo", notify)]
    steps = config.trainer.steps

    undisturbed, seconds, planned = _run_undisturbed(args, arguments, work, notify)
    folder = work / "disturbed"
    notify(f"starting the run with {args.kills} kills, seed {args.seed}")
    command = Command([*arguments, *_folders(folder)], work / "disturbed.log")
    try:
        found = FaultInjector(command, folder, planned, notify).run()
        orphans = command.orphans()
    finally:
        command.end()
    report = make_report(
        found,
        check_schedule(config, folder) if is_asynchronous(config) else comparison.compare(undisturbed, folder),
        orphans=orphans,
        kills_asked=args.kills,
        steps=steps,
        seed=args.seed,
        seconds_undisturbed=seconds,
    )
    if report.is_clean:
        command.remove_temporary()
    else:
        notify(f"logs: {work / 'disturbed.log'}, {command.temporary}")
    return report


def _run_undisturbed(
    args: argparse.Namespace, arguments: list[str], work: Path, notify: Callable[[str], None]
) -> tuple[Path, float, list[PlannedKill]]:
    """Return the folder of the undisturbed run, its duration in seconds, and the kills planned from its timeline."""
    folder = work / "undisturbed"
    notify("starting the undisturbed run")
    command = Command([*arguments, *_folders(folder)], work / "undisturbed.log")
    try:
        begin = time.time()
        watcher = RunWatcher(folder, begin)
        command.start()
        while (code := command.exit_code()) is None:
            time.sleep(POLL_SECONDS)
            watcher.poll()
        if code:
            raise WorkerError(f"the undisturbed run failed with exit code {code}:\n{command.log_tail()}")
        end = time.time()
    finally:
        command.end()
        command.remove_temporary()
    notify(f"{watcher.steps_done} steps in {end - begin:.1f} s")
    comparison.require_complete(folder)
    planned = plan_kills(args.kills, seed=args.seed, targets=args.targets, timeline=watcher.timeline(end))
    return folder, end - begin, planned


def _settings(args: argparse.Namespace) -> list[str]:
    """Return the overrides of both runs; the user's come last and take precedence."""
    steps = read_config(args.config, args.overrides).trainer.steps
    return [
        f"trainer.steps={max(steps, STEPS_PER_KILL * args.kills)}",
        "checkpoint.every=5",
        "checkpoint.keep_journal=all",
        f"recovery.max_restarts={20 + 2 * args.kills}",
        "recovery.max_identical_failures=10",
        *args.overrides,
    ]


def _folders(folder: Path) -> list[str]:
    return [f"run_dir={folder}", f"export_dir={folder / 'model'}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.chaos",
        description=(__doc__ or "").splitlines()[0],
        epilog=EXPLANATION.format(compared=(comparison.__doc__ or "").partition("\n\n")[2]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=Path("yaml/demo.yaml"), help="configuration of the run")
    parser.add_argument(
        "--kills",
        type=int,
        default=20,
        help=f"number of kills; the run has at least {STEPS_PER_KILL} steps per kill unless --set overrides it",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the kills; the runs use the seed of the configuration"
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        default=list(DEFAULT_TARGETS),
        choices=ALL_TARGETS,
        help=f"kinds of processes to kill (default: {' '.join(DEFAULT_TARGETS)}); a killed driver is resumed",
    )
    parser.add_argument("--work", type=Path, default=Path("runs/chaos"), help="folder for both runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    add_overrides(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
