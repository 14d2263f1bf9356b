"""Table of the nodes of a cluster: common values once, and per node what differs or has a problem.

all 3 nodes
Python              3.11.2
memory free         188.2 to 201.4 GiB

node                torch
a (10.0.0.1)        2.13.0
b and c             ! 2.12.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.preflight.cluster.findings import (
    ANSWER,
    CLOCK,
    GIB,
    GLOO,
    GPU_MEMORY,
    GPUS,
    MEMORY,
    REACH,
    REDUCTION,
    SHARED_MEMORY,
    Problem,
    format_names,
)
from megarl.preflight.cluster.node_report import NodeFacts, NodeReport

UNKNOWN = "?"
"""Cell of a node that did not report the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """One property of all nodes, in their order."""

    category: str
    cells: tuple[str, ...]
    span: str | None = None
    """Minimum to maximum of a quantity that may differ between nodes; None for other properties."""


def nodes_table(reports: Sequence[NodeReport], problems: Sequence[Problem]) -> RenderableType:
    """Build the table; cells with a problem are marked."""
    marked = {(problem.category, name) for problem in problems for name in problem.nodes or [r.name for r in reports]}
    columns = list(_columns(reports, marked))
    problem_categories = {category for category, _ in marked}
    common = [
        c for c in columns if c.category not in problem_categories and (c.span is not None or len(set(c.cells)) == 1)
    ]
    differing = [c for c in columns if c not in common]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row(Text(f"all {len(reports)} nodes", style="bold"))
    for column in common:
        table.add_row(column.category, Text(column.cells[0] if column.span is None else column.span))
    return Group(table, Text(), _per_node_table(reports, differing, marked)) if differing else table


def _per_node_table(
    reports: Sequence[NodeReport], columns: Sequence[TableColumn], marked: set[tuple[str, str]]
) -> Table:
    """Build a table with one row per node, or per group of nodes with equal values."""
    nodes_by_row: dict[tuple[tuple[str, bool], ...], list[str]] = {}
    for i, report in enumerate(reports):
        row = tuple((column.cells[i], (column.category, report.name) in marked) for column in columns)
        nodes_by_row.setdefault(row, []).append(report.name)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("node", *(column.category for column in columns)):
        table.add_column(Text(header), overflow="fold")
    for row, names in nodes_by_row.items():
        # the exclamation mark is for terminals without colors
        cells = [Text(f"! {cell}", style="red") if is_bad else Text(cell) for cell, is_bad in row]
        table.add_row(Text(format_names(names)), *cells)
    return table


def _columns(reports: Sequence[NodeReport], marked: set[tuple[str, str]]) -> Iterator[TableColumn]:
    """Yield all columns; `marked` has the category of each problem with the name of each node that has it."""
    yield from _failures(reports, marked, ANSWER)
    for package in dict.fromkeys(package for r in reports for package in r.versions):
        cells = (r.versions.get(package) or "none" if r.versions else UNKNOWN for r in reports)
        yield TableColumn(category=package, cells=tuple(cells))
    yield _facts_column(reports, GPUS, _gpus)
    if any(r.facts and r.facts.gpus for r in reports):
        yield _facts_column(reports, "driver", lambda facts: facts.gpus[0].driver if facts.gpus else "none")
        yield _quantity_column(reports, GPU_MEMORY, _used_bytes, GIB, "GiB")
    yield _quantity_column(reports, "cores", lambda facts: facts.cores, 1, "")
    yield _quantity_column(reports, MEMORY, lambda facts: facts.memory_bytes, GIB, "GiB")
    yield _quantity_column(reports, SHARED_MEMORY, lambda facts: facts.shared_memory_bytes, GIB, "GiB")
    clocks = [None if r.clock is None else r.clock.ahead_seconds * 1e3 for r in reports]
    yield _number_column(CLOCK, clocks, "ms")
    yield _facts_column(reports, GLOO, lambda facts: facts.gloo.name or str(facts.gloo.address))
    keys = dict.fromkeys(path.key for r in reports if r.facts for path in r.facts.paths)
    for key in keys:
        yield _facts_column(reports, key, partial(_path, key))
    yield from _failures(reports, marked, REACH)
    yield from _failures(reports, marked, REDUCTION)


def _failures(reports: Sequence[NodeReport], marked: set[tuple[str, str]], category: str) -> Iterator[TableColumn]:
    """Yield a column of ok and failed; nothing if no node has failed."""
    cells = tuple("failed" if (category, r.name) in marked else "ok" for r in reports)
    if "failed" in cells:
        yield TableColumn(category=category, cells=cells)


def _facts_column(reports: Sequence[NodeReport], category: str, text: Callable[[NodeFacts], str]) -> TableColumn:
    return TableColumn(category=category, cells=tuple(UNKNOWN if r.facts is None else text(r.facts) for r in reports))


def _quantity_column(
    reports: Sequence[NodeReport], category: str, number: Callable[[NodeFacts], float | None], unit: float, name: str
) -> TableColumn:
    found = [None if r.facts is None else number(r.facts) for r in reports]
    return _number_column(category, [None if one is None else one / unit for one in found], name)


def _number_column(category: str, numbers: Sequence[float | None], unit: str) -> TableColumn:
    """Make a column of numbers, whose span is their minimum to maximum if all are known."""
    known = [number for number in numbers if number is not None]
    digits = 1 if unit else 0
    cells = tuple(UNKNOWN if number is None else f"{number:.{digits}f} {unit}".strip() for number in numbers)
    least, most = (f"{end(known, default=0):.{digits}f}" for end in (min, max))
    span = least if least == most else f"{least} to {most}"
    return TableColumn(
        category=category, cells=cells, span=f"{span} {unit}".strip() if len(known) == len(numbers) else None
    )


def _gpus(facts: NodeFacts) -> str:
    names = [gpu.name for gpu in facts.gpus]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"


def _used_bytes(facts: NodeFacts) -> float:
    """Return the bytes in use on the GPU that has the most in use."""
    return max((gpu.used_bytes or 0 for gpu in facts.gpus), default=0)


def _path(key: str, facts: NodeFacts) -> str:
    path = next(path for path in facts.paths if path.key == key)
    return path.path if path.trouble is None else "no"
