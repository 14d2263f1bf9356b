"""`megarl train CONFIG`: reinforcement learning."""

from __future__ import annotations

import argparse

from megarl.cli.options import add_config_options, add_resume_option
from megarl.cli.output import console
from megarl.config import RunConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `megarl.cli.main.Command`."""
    add_config_options(parser)
    add_resume_option(parser)
    parser.add_argument(
        "--detach",
        action="store_true",
        help="leave the run to the Ray cluster at RAY_ADDRESS, and return; `megarl attach` follows it",
    )


def run(args: argparse.Namespace) -> int:
    """See `megarl.cli.main.Command`."""
    config = load_config(RunConfig, args.config, args.overrides)
    from megarl.controller.actor import Controller  # after the configuration is read: a wrong key is told at once
    from megarl.controller.run_stage import run_stage
    from megarl.tracking.startup import of_command

    run_stage(config, Controller.train, startup=of_command(), resume=args.resume, detach=args.detach)
    if args.detach:
        console().print(f"under way; follow it with: megarl attach {config.run_dir}", highlight=False)
        return 0
    print_where(config)
    return 0


def print_where(config: RunConfig) -> None:
    """Where the run's results are."""
    out = console()
    out.print(f"summary      {config.run_dir}/summary.json", highlight=False)
    if config.tracking.tensorboard:
        out.print(f"TensorBoard  tensorboard --logdir {config.run_dir}/tensorboard", highlight=False)
    if config.tracking.rollouts:
        out.print(f"rollouts     {config.run_dir}/rollouts/*.parquet", highlight=False)
    out.print(f"model        {config.export_path}", highlight=False)
