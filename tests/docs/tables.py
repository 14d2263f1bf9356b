"""Read the tables of a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterator


def section(page: str, title: str) -> str:
    """Return the text below the heading `title`, up to the next heading of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", page, re.MULTILINE)
    assert found is not None, f"there is no section {title}"
    rest = page[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest if end is None else rest[: end.start()]


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the cells of each table, row by row; the header is the first row."""
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


def code(cell: str) -> list[str]:
    """Return the spans of inline code of a cell."""
    return re.findall(r"`([^`]+)`", cell)
