"""`megarl import`: convert a run script or configuration of another trainer; nothing in it is executed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.cli.options import file_path, print_error
from megarl.config.commands import STAGES
from megarl.config.load import make_config
from megarl.errors import ConfigError
from megarl.importing.conversion import PEERS, Conversion, import_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `TRAINER FILE [--env NAME=VALUE ...] [--out FILE] [--json]`."""
    parser.add_argument("peer", choices=tuple(PEERS), metavar="TRAINER", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("file", type=file_path, metavar="FILE", help="bash script that starts the run, or a YAML file")
    parser.add_argument(
        "--env",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable that the script would be started with",
    )
    parser.add_argument("--out", type=file_path, metavar="FILE", help="write the configuration here instead of stdout")
    parser.add_argument("--json", action="store_true", help="print the configuration and the account of keys as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the configuration as YAML, with an account of all settings in comments.

    Raises:
        ConfigError: a value has the wrong type or is refused, or the configuration would not pass
            `megarl check --offline`; it is printed in this case too.
    """
    conversion = _checked(import_run(args.peer, args.file, _variables(args.env)))
    text = f"{conversion.json()}\n" if args.json else conversion.yaml()
    if args.out is None:
        print(text, end="")
    else:
        try:
            args.out.write_text(text, encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"--out {args.out}: cannot write the file: {e.strerror}") from e
        print(f"wrote {args.out}", file=sys.stderr)
    for problem in conversion.problems:
        print_error(problem)
    return ConfigError.exit_code if conversion.problems else 0


def _checked(conversion: Conversion) -> Conversion:
    """Return the conversion with the problems of `megarl check --offline`."""
    if conversion.problems:
        return conversion
    from megarl.controller.preflight.run_checks import check_offline  # imports torch

    try:
        check_offline(make_config(STAGES[conversion.command], conversion.tree()))
    except ConfigError as e:
        return replace(conversion, problems=str(e).splitlines())
    return conversion


def _variables(given: Sequence[str]) -> Mapping[str, str]:
    pairs = [text.partition("=") for text in given]
    for text, (name, equals, _) in zip(given, pairs, strict=True):
        if not (name and equals):
            raise ConfigError(f"--env {text}: needs the form NAME=VALUE")
    return {name: value for name, _, value in pairs}
