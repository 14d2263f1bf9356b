"""Output of commands: results to stdout, errors to stderr."""

from __future__ import annotations

import sys
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
