"""`megarl schema`: print the JSON Schema of a command's configuration, for completion and checks in editors."""

from __future__ import annotations

import argparse
import json

from megarl.config import STAGES
from megarl.offline.config_schema import make_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `COMMAND`, the command whose configuration is described."""
    parser.add_argument("command", choices=tuple(STAGES), metavar="COMMAND", help=f"one of {', '.join(STAGES)}")


def run(args: argparse.Namespace) -> int:
    """Print the schema as JSON."""
    print(json.dumps(make_schema(args.command), indent=2))
    return 0
