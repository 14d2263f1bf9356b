"""The nodes of a cluster for people: what all have in common once, and by node what differs or is wrong.

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
    listed,
)
from megarl.preflight.cluster.node_report import NodeFacts, NodeReport

UNKNOWN = "?"
"""In the cell of a node that did not get so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One thing that is known of nodes, in their order."""

    about: str
    cells: tuple[str, ...]
    span: str | None = None
    """What nodes have together where it is a quantity, which differs without being wrong."""


def nodes_table(reports: Sequence[NodeReport], problems: Sequence[Problem]) -> RenderableType:
    """What is known of the nodes, those that `problems` are about marked."""
    bad = {(problem.about, name) for problem in problems for name in problem.nodes or [r.name for r in reports]}
    columns = list(_columns(reports, bad))
    told = {about for about, _ in bad}
    shared = [c for c in columns if c.about not in told and (c.span is not None or len(set(c.cells)) == 1)]
    apart = [c for c in columns if c not in shared]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row(Text(f"all {len(reports)} nodes", style="bold"))
    for column in shared:
        table.add_row(column.about, Text(column.cells[0] if column.span is None else column.span))
    return Group(table, Text(), _apart(reports, apart, bad)) if apart else table


def _apart(reports: Sequence[NodeReport], columns: Sequence[Column], bad: set[tuple[str, str]]) -> Table:
    """A row for every node, or for several that are alike."""
    alike: dict[tuple[tuple[str, bool], ...], list[str]] = {}
    for i, report in enumerate(reports):
        row = tuple((column.cells[i], (column.about, report.name) in bad) for column in columns)
        alike.setdefault(row, []).append(report.name)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("node", *(column.about for column in columns)):
        table.add_column(Text(header), overflow="fold")
    for row, names in alike.items():
        # the mark is for where there are no colours
        cells = [Text(f"! {cell}", style="red") if is_bad else Text(cell) for cell, is_bad in row]
        table.add_row(Text(listed(names)), *cells)
    return table


def _columns(reports: Sequence[NodeReport], bad: set[tuple[str, str]]) -> Iterator[Column]:
    """`bad`: what problems are about, and a node that has one."""
    yield from _failures(reports, bad, ANSWER)
    for package in dict.fromkeys(package for r in reports for package in r.versions):
        cells = (r.versions.get(package) or "none" if r.versions else UNKNOWN for r in reports)
        yield Column(about=package, cells=tuple(cells))
    yield _of_facts(reports, GPUS, _gpus)
    if any(r.facts and r.facts.gpus for r in reports):
        yield _of_facts(reports, "driver", lambda facts: facts.gpus[0].driver if facts.gpus else "none")
        yield _quantity(reports, GPU_MEMORY, _used_bytes, GIB, "GiB")
    yield _quantity(reports, "cores", lambda facts: facts.cores, 1, "")
    yield _quantity(reports, MEMORY, lambda facts: facts.memory_bytes, GIB, "GiB")
    yield _quantity(reports, SHARED_MEMORY, lambda facts: facts.shared_memory_bytes, GIB, "GiB")
    clocks = [None if r.clock is None else r.clock.ahead_seconds * 1e3 for r in reports]
    yield _span(CLOCK, clocks, "ms")
    yield _of_facts(reports, GLOO, lambda facts: facts.gloo.name or str(facts.gloo.address))
    keys = dict.fromkeys(path.key for r in reports if r.facts for path in r.facts.paths)
    for key in keys:
        yield _of_facts(reports, key, partial(_path, key))
    yield from _failures(reports, bad, REACH)
    yield from _failures(reports, bad, REDUCTION)


def _failures(reports: Sequence[NodeReport], bad: set[tuple[str, str]], about: str) -> Iterator[Column]:
    """Nothing where no node has failed."""
    cells = tuple("failed" if (about, r.name) in bad else "ok" for r in reports)
    if "failed" in cells:
        yield Column(about=about, cells=cells)


def _of_facts(reports: Sequence[NodeReport], about: str, text: Callable[[NodeFacts], str]) -> Column:
    return Column(about=about, cells=tuple(UNKNOWN if r.facts is None else text(r.facts) for r in reports))


def _quantity(
    reports: Sequence[NodeReport], about: str, number: Callable[[NodeFacts], float | None], unit: float, name: str
) -> Column:
    found = [None if r.facts is None else number(r.facts) for r in reports]
    return _span(about, [None if one is None else one / unit for one in found], name)


def _span(about: str, numbers: Sequence[float | None], unit: str) -> Column:
    """From the least to the most of what is known."""
    known = [number for number in numbers if number is not None]
    digits = 1 if unit else 0
    cells = tuple(UNKNOWN if number is None else f"{number:.{digits}f} {unit}".strip() for number in numbers)
    least, most = (f"{end(known, default=0):.{digits}f}" for end in (min, max))
    span = least if least == most else f"{least} to {most}"
    return Column(about=about, cells=cells, span=f"{span} {unit}".strip() if len(known) == len(numbers) else None)


def _gpus(facts: NodeFacts) -> str:
    names = [gpu.name for gpu in facts.gpus]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"


def _used_bytes(facts: NodeFacts) -> float:
    """On the GPU that is the fullest."""
    return max((gpu.used_bytes or 0 for gpu in facts.gpus), default=0)


def _path(key: str, facts: NodeFacts) -> str:
    path = next(path for path in facts.paths if path.key == key)
    return path.path if path.trouble is None else "no"
