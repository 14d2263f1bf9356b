"""`megarl train CONFIG`: train a policy by reinforcement learning."""

from __future__ import annotations

import argparse

from megarl.cli.options import add_config_options, add_resume_option
from megarl.cli.output import console
from megarl.config import RunConfig, load_config


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
