"""`megarl attach RUN`: follow a run that was started with `megarl train --detach`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.cli.output import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `megarl.cli.main.Command`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--stop", action="store_true", help="have it end after the step under way, with a checkpoint")


def run(args: argparse.Namespace) -> int:
    """See `megarl.cli.main.Command`. Ctrl-C leaves the run alone."""
    from megarl.controller.attach import attach

    attach(args.run.absolute(), stop=args.stop)
    console().print(f"the run has ended: {args.run}/summary.json", highlight=False)
    return 0
