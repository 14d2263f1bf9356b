"""`megarl rm CONFIG`: a reward or cost model from pairs of answers."""

from __future__ import annotations

import argparse

from megarl.cli.options import add_config_options, add_resume_option
from megarl.cli.stage import load_stage, run_anywhere
from megarl.config import RmConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `megarl.cli.main.Command`."""
    add_config_options(parser)
    add_resume_option(parser)


def run(args: argparse.Namespace) -> int:
    """See `megarl.cli.main.Command`; under torchrun its ranks run the stage, and Ray is not started."""
    config, world = load_stage(RmConfig, args)
    from megarl.controller.actor import Controller  # after the configuration is read: a wrong key is told at once
    from megarl.stages.build_stages import make_rm

    return run_anywhere(config, world, Controller.rm, make_rm, resume=args.resume)
