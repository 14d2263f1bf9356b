"""Kills random processes of a run at random moments, and compares it with an undisturbed run.

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
from benchmarks.chaos.disturb import LOOK_SECONDS, Disturbance
from benchmarks.chaos.plan import STEPS_PER_KILL, PlannedKill, plan_kills
from benchmarks.chaos.prepare import make_demo, read_config
from benchmarks.chaos.report import ChaosReport, make_report
from benchmarks.chaos.show import markdown, print_table
from benchmarks.chaos.targets import ALL, USUAL
from benchmarks.chaos.watch import Watch
from benchmarks.results_file import write_results
from megarl.cli.options import add_overrides
from megarl.controller.run_stage import rotate
from megarl.errors import ConfigError, MegarlError, WorkerError

EXPLANATION = """\
The run is made twice, with the same configuration and seed: once in peace, once with kills (SIGKILL, by process id).
When and whom is decided by --seed and by the phases of the undisturbed run; a tenth of the kills hit the run while it
recovers from the one before. A kill counts as recovered when a step that began after it has ended (or the run has, in
order) without the command having been started again. A command that ends with an error is started again with
`--resume auto`.

Compared, bit by bit, at the end:
{compared}
Generation is reproducible because finished rollouts are replayed from the run's journal, and unfinished ones are
sampled again with the same seeds: SGLang's deterministic inference on CPUs makes a completion depend on its prompt and
seed alone.

Orphans are processes that live 15 s after the run's end (Ray's two agents, which report a killed cluster for 60 s,
after 70 s), and new files in /dev/shm that no process has mapped. The exit code is 0 if all kills were made and
recovered from, both runs are equal, and there is no orphan; else 1.
"""


INTRODUCTION = """\
# A run whose processes are killed, and the same run in peace

On a machine with {cores} CPU cores:

```
{command}
```

Each kill is a SIGKILL of one process at a random moment. "Recovered": the run went on by itself. Recovery counts from
the kill to the end of the first step that began after it, and is mostly the start of processes. "Bitwise equal":
weights, optimizer, every other value of the last checkpoint, the exported model, the prompts of each step, every
trajectory and the metrics that follow from the training.

"""


def main() -> int:
    """One report, on stdout; progress on stderr."""
    args = _parser().parse_args()
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        report = _run(args, say)
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


def _run(args: argparse.Namespace, say: Callable[[str], None]) -> ChaosReport:
    if args.kills < 1:
        raise ConfigError(f"--kills needs at least 1, got {args.kills}")
    work = args.work.absolute()
    settings = _settings(args)
    config = read_config(args.config, settings)
    if work.exists() and any(work.iterdir()):
        say(f"{args.work} exists; moved to {rotate(work)}")
    work.mkdir(parents=True, exist_ok=True)
    arguments = ["train", str(args.config), "--set", *settings, *make_demo(config, work / "demo", say)]
    steps = config.trainer.steps

    quiet, seconds, planned = _undisturbed(args, arguments, work, say)
    folder = work / "disturbed"
    say(f"the same with {args.kills} kills, seed {args.seed}")
    command = Command([*arguments, *_folders(folder)], work / "disturbed.log")
    try:
        found = Disturbance(command, folder, planned, say).run()
        orphans = command.orphans()
    finally:
        command.end()
    report = make_report(
        found,
        comparison.compare(quiet, folder),
        orphans=orphans,
        kills_asked=args.kills,
        steps=steps,
        seed=args.seed,
        seconds_undisturbed=seconds,
    )
    if report.is_clean:
        command.forget()
    else:
        say(f"logs: {work / 'disturbed.log'}, {command.temporary}")
    return report


def _undisturbed(
    args: argparse.Namespace, arguments: list[str], work: Path, say: Callable[[str], None]
) -> tuple[Path, float, list[PlannedKill]]:
    """The run's folder, how long it took, and the kills that its course leads to."""
    folder = work / "undisturbed"
    say("the undisturbed run")
    command = Command([*arguments, *_folders(folder)], work / "undisturbed.log")
    try:
        begin = time.time()
        watch = Watch(folder, begin)
        command.start()
        while (code := command.exit_code()) is None:
            time.sleep(LOOK_SECONDS)
            watch.look()
        if code:
            raise WorkerError(f"the undisturbed run ended with exit code {code}:\n{command.last_words()}")
        end = time.time()
    finally:
        command.end()
        command.forget()
    say(f"{watch.steps_done} steps in {end - begin:.1f} s")
    comparison.require_whole(folder)
    planned = plan_kills(args.kills, seed=args.seed, targets=args.targets, timeline=watch.timeline(end))
    return folder, end - begin, planned


def _settings(args: argparse.Namespace) -> list[str]:
    """Overrides of both runs; the user's come last, and win."""
    steps = read_config(args.config, args.overrides).trainer.steps
    return [
        f"trainer.steps={max(steps, STEPS_PER_KILL * args.kills)}",
        "checkpoint.every=5",
        f"recovery.max_restarts={20 + 2 * args.kills}",
        "recovery.max_identical_failures=10",
        "recovery.backoff_seconds=0.1",
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
    parser.add_argument("--config", type=Path, default=Path("yaml/demo.yaml"), help="of the run")
    parser.add_argument(
        "--kills",
        type=int,
        default=20,
        help=f"the run gets {STEPS_PER_KILL} steps for each, unless --set says otherwise",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the kills; the runs' own is the configuration's")
    parser.add_argument(
        "--targets",
        nargs="+",
        default=list(USUAL),
        choices=ALL,
        help=f"what may be killed; default: {' '.join(USUAL)}. A killed driver is started again with --resume auto",
    )
    parser.add_argument("--work", type=Path, default=Path("runs/chaos"), help="folder for both runs")
    parser.add_argument("--json", action="store_true", help="one object")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table there")
    add_overrides(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
