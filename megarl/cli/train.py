"""The commands that work on a run: `megarl train | sft | rm | dpo | eval CONFIG`, `megarl attach | replay RUN`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli.options import add_config_options, add_resume_option, console, file_path
from megarl.cluster.process.launcher_env import TorchrunWorld, report_on_rank0, torchrun_world
from megarl.config import DpoConfig, RmConfig, RunConfig, SftConfig, StageConfig, load_config
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.cluster.workers.group import Processes
    from megarl.controller.actor import Controller
    from megarl.controller.spmd_stage import StageLoop
    from megarl.tracking.progress import EventLog


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A command in `COMMANDS`; satisfies `megarl.cli.main.Command`."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Declares the command's arguments."""
    run: Callable[[argparse.Namespace], int]
    """Runs the command and returns its exit code."""


# Controllers and stages are imported after the configuration is loaded: an unknown key is reported without that wait.


def _add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG`, `--set` and `--resume`."""
    add_config_options(parser)
    add_resume_option(parser)


def _run_sft(args: argparse.Namespace) -> int:
    config, world = _load_stage(SftConfig, args)
    from megarl.controller.actor import Controller
    from megarl.stages import make_sft

    return _run_stage(config, world, Controller.sft, make_sft, resume=args.resume)


def _run_rm(args: argparse.Namespace) -> int:
    config, world = _load_stage(RmConfig, args)
    from megarl.controller.actor import Controller
    from megarl.stages import make_rm

    return _run_stage(config, world, Controller.rm, make_rm, resume=args.resume)


def _run_dpo(args: argparse.Namespace) -> int:
    config, world = _load_stage(DpoConfig, args)
    from megarl.controller.actor import Controller
    from megarl.stages import make_dpo

    return _run_stage(config, world, Controller.dpo, make_dpo, resume=args.resume)


def _load_stage[C: StageConfig](kind: type[C], args: argparse.Namespace) -> tuple[C, TorchrunWorld | None]:
    """Load the configuration, and the world of this process where torchrun started it."""
    world = torchrun_world()
    with report_on_rank0(world):
        config = load_config(kind, args.config, args.overrides, slots=world.slots if world else None)
        if world is not None:
            world.check_placement(config.placement)
    return config, world


def _run_stage[C: StageConfig](
    config: C,
    world: TorchrunWorld | None,
    method: Callable[[Controller, C, Path | None], Any],
    make: Callable[[C, EventLog, Processes, Path | None], StageLoop],
    *,
    resume: str | None,
) -> int:
    """Run the stage on the ranks of `world`, under torchrun, or on Ray where it is None; print the model's folder.

    Args:
        method: controller method that runs the stage on Ray.
        make: builds the stage for `run_spmd_stage`.
        resume: value of --resume, as `megarl.controller.resume` takes it.
    """
    if world is None:
        from megarl.controller.run_stage import run_stage

        run_stage(config, method, resume=resume)
    else:
        from megarl.controller.spmd_stage import run_spmd_stage

        run_spmd_stage(config, make, world, name=method.__name__, resume=resume)
    if world is None or world.rank == 0:
        console().print(f"model        {config.export_path}", highlight=False)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG [--set KEY=VALUE ...] [--resume ...] [--detach]`."""
    add_config_options(parser)
    add_resume_option(parser)
    parser.add_argument(
        "--detach",
        action="store_true",
        help="start the run on the Ray cluster at RAY_ADDRESS and return; follow it with `megarl attach`",
    )


def run(args: argparse.Namespace) -> int:
    """Run the training, or start it and return with --detach; print where the results are."""
    config = load_config(RunConfig, args.config, args.overrides)
    from megarl.controller.actor import Controller  # after the configuration is loaded: an unknown key fails fast
    from megarl.controller.run_stage import run_stage
    from megarl.tracking.timing import command_startup

    run_stage(config, Controller.train, startup=command_startup(), resume=args.resume, detach=args.detach)
    if args.detach:
        console().print(f"started; follow it with: megarl attach {config.run_dir}", highlight=False)
        return 0
    print_results(config)
    return 0


def print_results(config: RunConfig) -> None:
    """Print the paths of the run's results."""
    out = console()
    out.print(f"summary      {config.run_dir}/summary.json", highlight=False)
    if config.tracking.tensorboard:
        out.print(f"TensorBoard  tensorboard --logdir {config.run_dir}/tensorboard", highlight=False)
    if config.tracking.rollouts:
        out.print(f"rollouts     {config.run_dir}/rollouts/*.parquet", highlight=False)
    out.print(f"model        {config.export_path}", highlight=False)


def _add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG [--set KEY=VALUE ...] [--json]`."""
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run_eval(args: argparse.Namespace) -> int:
    """Evaluate on the held-out rows and print the mean of the term `reward.eval_term`, and pass@k if configured."""
    config = load_config(RunConfig, args.config, args.overrides)
    if not config.data.held_out_files:
        raise ConfigError("data.eval_path: evaluation needs held-out rows, got null")
    from megarl.controller.actor import Controller
    from megarl.controller.run_stage import run_stage

    metrics = run_stage(config, Controller.evaluate, begins_run=False)
    if args.json:
        print(json.dumps({**metrics, "model": config.model.path}))
    else:
        for name, value in metrics.items():
            console().print(f"{name} {value:.4f}", highlight=False)
    return 0


def _add_attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments `RUN [--stop] [--set KEY=VALUE ...]`."""
    parser.add_argument("run", type=file_path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--stop", action="store_true", help="stop the run after its current step; it writes a checkpoint first"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="extend",
        nargs="+",
        default=[],
        metavar="reward.terms.NAME.weight=VALUE",
        help="change the weight of a reward term from the run's next step on",
    )


def _run_attach(args: argparse.Namespace) -> int:
    """Print the run's progress until it ends. Ctrl-C stops following; the run continues."""
    from megarl.controller.run_stage import attach

    attach(args.run.absolute(), stop=args.stop, settings=args.settings)
    console().print(f"the run has ended: {args.run}/summary.json", highlight=False)
    return 0


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN [--out FOLDER] [--json]`."""
    parser.add_argument("run_dir", type=file_path, metavar="RUN", help="folder of the run (its run_dir)")
    parser.add_argument("--out", type=file_path, metavar="FOLDER", help="folder for the replay; default: RUN/replay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run_replay(args: argparse.Namespace) -> int:
    """Replay the run without engines; exit code 1 if a checkpoint differs from that of the run."""
    from megarl.controller.replay import replay_run  # imports Ray

    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # progress
        report = replay_run(args.run_dir.absolute(), (args.out or args.run_dir / "replay").absolute())
    if args.json:
        print(json.dumps({**asdict(report), "training_share": report.training_share}))
    else:
        for step, differing in report.checkpoints.items():
            what = f"{len(differing)} values differ, such as {differing[0]}" if differing else "bitwise equal"
            console().print(f"step {step}: {what}", highlight=False)
        if report.first_difference is not None:
            console().print(f"the first step whose training differs is {report.first_difference}", highlight=False)
        console().print(report.line, highlight=False)
    return 1 if any(report.checkpoints.values()) else 0


COMMANDS = {
    "sft": RunCommand(_add_stage_arguments, _run_sft),
    "rm": RunCommand(_add_stage_arguments, _run_rm),
    "dpo": RunCommand(_add_stage_arguments, _run_dpo),
    "eval": RunCommand(_add_eval_arguments, _run_eval),
    "attach": RunCommand(_add_attach_arguments, _run_attach),
    "replay": RunCommand(_add_replay_arguments, _run_replay),
}
"""Command -> what it does, for those of this module other than `train`."""
