"""`megarl attach RUN`: follow a run that was started with `megarl train --detach`."""

from __future__ import annotations

import argparse

from megarl.cli.options import console, file_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Print the run's progress until it ends. Ctrl-C stops following; the run continues."""
    from megarl.controller.attach import attach

    attach(args.run.absolute(), stop=args.stop, settings=args.settings)
    console().print(f"the run has ended: {args.run}/summary.json", highlight=False)
    return 0
