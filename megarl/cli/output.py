"""How commands speak: results on stdout, errors on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160
"""Columns of tables that go to a file or a pipe, where rich would fold them at 80."""


def console(*, stderr: bool = False) -> Console:
    """A console that keeps the terminal's width, and is wide and plain elsewhere."""
    from rich.console import Console  # not at import: `megarl --help` answers without it

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def print_error(message: str) -> None:
    """Write `error: <message>` to stderr, every line as it is: no markup, no folding."""
    if not sys.stderr.isatty():
        print(f"error: {message}", file=sys.stderr)
        return
    from rich.text import Text

    console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
