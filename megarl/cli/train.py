"""`megarl train | sft | rm | dpo CONFIG`: train a policy by reinforcement learning, or another stage."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli.options import add_config_options, add_resume_option, console
from megarl.cluster.process.torchrun_env import TorchrunWorld, report_on_rank0, torchrun_world
from megarl.config import DpoConfig, RmConfig, RunConfig, SftConfig, StageConfig, load_config

if TYPE_CHECKING:
    from megarl.cluster.workers.group import Processes
    from megarl.controller.actor import Controller
    from megarl.controller.spmd_stage import StageLoop
    from megarl.run.run_events import EventLog


@dataclass(frozen=True, slots=True)
class StageCommand:
    """The command of one stage; satisfies `megarl.cli.main.Command`."""

    run: Callable[[argparse.Namespace], int]
    """Runs the stage and returns the exit code. Under torchrun the stage runs in its ranks, and Ray is not started."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `CONFIG`, `--set` and `--resume`."""
        add_config_options(parser)
        add_resume_option(parser)


# Controllers and stages are imported after the configuration is loaded: an unknown key is reported without that wait.


def _run_sft(args: argparse.Namespace) -> int:
    config, world = _load_stage(SftConfig, args)
    from megarl.controller.actor import Controller
    from megarl.stages.build_stages import make_sft

    return _run_stage(config, world, Controller.sft, make_sft, resume=args.resume)


def _run_rm(args: argparse.Namespace) -> int:
    config, world = _load_stage(RmConfig, args)
    from megarl.controller.actor import Controller
    from megarl.stages.build_stages import make_rm

    return _run_stage(config, world, Controller.rm, make_rm, resume=args.resume)


def _run_dpo(args: argparse.Namespace) -> int:
    config, world = _load_stage(DpoConfig, args)
    from megarl.controller.actor import Controller
    from megarl.stages.build_stages import make_dpo

    return _run_stage(config, world, Controller.dpo, make_dpo, resume=args.resume)


STAGE_COMMANDS = {"sft": StageCommand(_run_sft), "rm": StageCommand(_run_rm), "dpo": StageCommand(_run_dpo)}
"""Name -> command of that stage."""


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
    """Run the stage on the ranks of `world`, or on Ray where it is None, and print the model's folder.

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
    from megarl.tracking.startup import command_startup

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
