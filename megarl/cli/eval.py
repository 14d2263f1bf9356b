"""`megarl eval CONFIG`: evaluate a model on held-out rows."""

from __future__ import annotations

import argparse
import json

from megarl.cli.options import add_config_options, console
from megarl.config import RunConfig, load_config
from megarl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG [--set KEY=VALUE ...] [--json]`."""
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate on the held-out rows and print the mean of the term `reward.eval_term`, and pass@k if configured."""
    config = load_config(RunConfig, args.config, args.overrides)
    if not config.data.held_out_files:
        raise ConfigError("data.eval_path: evaluation needs held-out rows, got null")
    from megarl.controller.actor import Controller  # after the configuration is loaded: an unknown key fails fast
    from megarl.controller.run_stage import run_stage

    metrics = run_stage(config, Controller.evaluate, begins_run=False)
    if args.json:
        print(json.dumps({**metrics, "model": config.model.path}))
    else:
        for name, value in metrics.items():
            console().print(f"{name} {value:.4f}", highlight=False)
    return 0
