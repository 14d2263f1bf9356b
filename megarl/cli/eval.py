"""`megarl eval CONFIG`: the held-out score of a model."""

from __future__ import annotations

import argparse
import json

from megarl.cli.options import add_config_options
from megarl.cli.output import console
from megarl.config import RunConfig, load_config
from megarl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `megarl.cli.main.Command`."""
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """See `megarl.cli.main.Command`."""
    config = load_config(RunConfig, args.config, args.overrides)
    if config.data.eval_path is None:
        raise ConfigError("data.eval_path: evaluation needs held-out rows, got none")
    from megarl.controller.actor import Controller  # after the configuration is read: a wrong key is told at once
    from megarl.controller.run_stage import run_stage

    value = run_stage(config, Controller.evaluate, begins_run=False)
    name = f"eval/{config.reward.eval_name}"
    if args.json:
        print(json.dumps({name: value, "model": config.model.path}))
    else:
        console().print(f"{name} {value:.4f}", highlight=False)
    return 0
