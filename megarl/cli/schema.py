"""`megarl schema`: print the JSON Schema of a command's configuration, for editors, or a reference of its keys."""

from __future__ import annotations

import argparse
import json

from megarl.cli.tools.config_reference import make_reference, make_schema
from megarl.config import STAGES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `COMMAND [--markdown]`: the command whose configuration is described, and the format."""
    parser.add_argument("command", choices=tuple(STAGES), metavar="COMMAND", help=f"one of {', '.join(STAGES)}")
    parser.add_argument(
        "--markdown", action="store_true", help="print a reference of all keys as Markdown instead of the schema"
    )


def run(args: argparse.Namespace) -> int:
    """Print the schema as JSON, or the reference as Markdown."""
    if args.markdown:
        print(make_reference(args.command))
        return 0
    print(json.dumps(make_schema(args.command), indent=2))
    return 0
