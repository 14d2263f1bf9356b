"""Command-line options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """`CONFIG [--set KEY=VALUE ...]`, as `args.config` and `args.overrides`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the run")
    add_overrides(parser)


def add_resume_option(parser: argparse.ArgumentParser) -> None:
    """`[--resume auto|STEP|PATH]`, as `args.resume`."""
    parser.add_argument(
        "--resume",
        metavar="auto|STEP|PATH",
        help="go on with the run in run_dir: from its newest whole checkpoint, from that of a step, or from a "
        "checkpoint's folder, which may be of another run",
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """`[--set KEY=VALUE ...]`, as `args.overrides`."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as trainer.optimizer.lr=1e-5; the value is YAML, the last one wins",
    )
