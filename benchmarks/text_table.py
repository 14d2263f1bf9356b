"""Tables of text for the terminal and for Markdown files; the first columns hold text, the others numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 190
"""Characters of a line where the output is no terminal."""


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int) -> None:
    """Print a table to stdout, with numbers aligned to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_text_columns else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if Console().is_terminal else WIDTH).print(table)


def markdown_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int) -> str:
    """Return a table in Markdown, with numbers aligned to the right."""
    alignment = ["---"] * num_text_columns + ["---:"] * (len(columns) - num_text_columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, alignment, *rows]) + "\n"
