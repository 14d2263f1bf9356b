"""`megarl eval CONFIG`: evaluate a model on held-out rows."""

from __future__ import annotations

import argparse
import json

from megarl.cli.options import add_config_options
from megarl.cli.output import console
from megarl.config import RunConfig, load_config
from megarl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG [--set KEY=VALUE ...] [--json]`."""
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate on `data.eval_path` and print the mean of the term `reward.eval_term`."""
    config = load_config(RunConfig, args.config, args.overrides)
    if config.data.eval_path is None:
        raise ConfigError("data.eval_path: evaluation needs held-out rows, got null")
    from megarl.controller.actor import Controller  # after the configuration is loaded: an unknown key fails fast
    from megarl.controller.run_stage import run_stage

    value = run_stage(config, Controller.evaluate, begins_run=False)
    name = f"eval/{config.reward.eval_name}"
    if args.json:
        print(json.dumps({name: value, "model": config.model.path}))
    else:
        console().print(f"{name} {value:.4f}", highlight=False)
    return 0
