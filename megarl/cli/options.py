"""Command-line options that several commands share, and their output: results to stdout, errors to stderr."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


PIPE_WIDTH = 160
"""Width in columns of tables written to a file or pipe, where rich would wrap at 80."""


def console(*, stderr: bool = False) -> Console:
    """Make a rich console as wide as the terminal; in a file or pipe it is `PIPE_WIDTH` wide and plain."""
    from rich.console import Console  # not at import: `megarl --help` does not need it

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def print_error(message: str) -> None:
    """Write `error: <message>` to stderr verbatim: no markup, no wrapping."""
    if not sys.stderr.isatty():
        print(f"error: {message}", file=sys.stderr)
        return
    from rich.text import Text

    console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def home_path(text: str) -> str:
    """Return an argument with the home folder in the place of a leading `~`, which shells leave in `--out=~/x`."""
    from megarl.config.section import expand_home  # not at import: `megarl --help` does not need pydantic

    try:
        return expand_home(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def file_path(text: str) -> Path:
    """Return an argument as a path, with the home folder in the place of a leading `~`."""
    return Path(home_path(text))


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG [--set KEY=VALUE ...]`, parsed as `args.config` and `args.overrides`."""
    parser.add_argument("config", type=file_path, metavar="CONFIG", help="YAML configuration file of the run")
    add_overrides(parser)


def add_resume_option(parser: argparse.ArgumentParser) -> None:
    """Declare `[--resume auto|STEP|PATH]`, parsed as `args.resume`."""
    parser.add_argument(
        "--resume",
        type=home_path,
        metavar="auto|STEP|PATH",
        help="resume the run in run_dir: from its latest valid checkpoint (auto), from that of STEP, or from the "
        "checkpoint folder PATH, which may belong to another run",
    )


def add_family(parser: argparse.ArgumentParser) -> None:
    """Declare `[--family PATH]`, parsed as `args.family`."""
    parser.add_argument(
        "--family",
        metavar="MODULE:FAMILY",
        help="import path of the model's family, if that is outside megarl: as model.family in a configuration",
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Declare `[--set KEY=VALUE ...]`, parsed as `args.overrides`."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="override a configuration key, such as trainer.optimizer.lr=1e-5; the value is YAML, the last one wins",
    )
