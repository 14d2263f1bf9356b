"""Find the problems of a cluster in the reports of its nodes.

The table of the nodes has common values once, and per node what differs or has a problem:

all 3 nodes
Python              3.11.2
memory free         188.2 to 201.4 GiB

node                torch
a (10.0.0.1)        2.13.0
b and c             ! 2.12.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.controller.preflight.node_report import SOURCE, NodeFacts, NodeReport

GIB = 2**30

MAX_CLOCK_SKEW_SECONDS = 1.0
"""Tolerated clock offset between nodes; beyond it, log times and timeouts are unreliable."""

MIN_MEMORY = 2 * GIB
"""Free memory in bytes that Ray and two or three processes with torch need."""
MIN_SHARED_MEMORY = 512 * 2**20
"""Free bytes in /dev/shm for Ray's object store and weight buckets."""

IDLE_GPU_BYTES = GIB
"""Bytes that the driver itself may use on an idle GPU."""

MAX_NAMES = 3
"""Nodes listed by name in a message about many."""

CLOCK, MEMORY, SHARED_MEMORY = "clock ahead", "memory free", "/dev/shm free"  # noqa: S108 -- a name
GPUS, GPU_MEMORY, GLOO = "GPUs", "GPU memory in use", "gloo"
ANSWER, REACH, REDUCTION = "answer", "reach", "reduction"
"""Categories of problems besides package names and configuration keys; also columns of the node table."""

BUILD_DEPENDENT_PACKAGES = ("torch", "NCCL")
"""Packages whose builds may differ between nodes with and without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem and the nodes that have it."""

    category: str
    """Column of the node table that shows the problem."""
    nodes: tuple[str, ...]
    """Node names; empty for a problem of the whole cluster."""
    message: str


def messages(problems: Sequence[Problem], num_nodes: int) -> list[str]:
    """Return one line per problem, prefixed by the nodes that have it."""
    return [f"{_subject(p.nodes, num_nodes)}{p.message}" for p in problems]


def _subject(names: Sequence[str], num_nodes: int) -> str:
    if not names:
        return ""
    if len(names) == 1:
        return f"node {names[0]}: "
    if len(names) == num_nodes:
        return f"all {num_nodes} nodes: "
    return f"nodes {format_names(names)}: "


def format_names(names: Sequence[str]) -> str:
    """Join the names; of many, list the first MAX_NAMES and the number of the rest."""
    if len(names) <= MAX_NAMES + 1:
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"


def find_problems(reports: Sequence[NodeReport], *, gpus_held: float = 0.0) -> list[Problem]:
    """Return all problems in the reports; nodes with the same problem are merged into one.

    Args:
        gpus_held: GPUs allocated to processes of the Ray cluster, summed over nodes.
    """
    found = [Problem(category=ANSWER, nodes=(r.name,), message=r.failure) for r in reports if r.failure is not None]
    found += _find_version_problems(reports)
    for report in reports:
        found += [
            Problem(category=category, nodes=(report.name,), message=message)
            for category, message in _find_single_node_problems(report, gpus_held)
        ]
    found += _find_loopback_problems(reports)
    found += _find_size_problems(reports)
    return merge_problems(found)


def merge_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Merge problems of equal category and message, with the nodes of all of them."""
    nodes: dict[tuple[str, str], dict[str, None]] = {}
    for problem in problems:
        nodes.setdefault((problem.category, problem.message), {}).update(dict.fromkeys(problem.nodes))
    return [
        Problem(category=category, nodes=tuple(names), message=message) for (category, message), names in nodes.items()
    ]


def _find_version_problems(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    answered = [r for r in reports if r.versions]
    for package in dict.fromkeys(package for r in answered for package in r.versions):
        have = {r.name: r.versions.get(package) for r in answered}
        if package not in BUILD_DEPENDENT_PACKAGES:
            yield from _find_mismatches(package, have, package)
            continue
        # 2.13.0+cpu and 2.13.0+cu130 are the same version, built for different kinds of nodes
        public = {name: None if v is None else v.partition("+")[0] for name, v in have.items()}
        across = [] if package == "NCCL" else list(_find_mismatches(package, public, package))
        for with_gpus in (True, False):
            of_kind = {r.name: have[r.name] for r in answered if bool(r.gpus) == with_gpus}
            across = across or list(_find_mismatches(package, of_kind, package))
        yield from across


def _find_mismatches(category: str, have: Mapping[str, str | None], what: str) -> Iterator[Problem]:
    """Yield a problem per node that deviates from the most common version; one for all if there is no such version."""
    counts = Counter(have.values()).most_common()
    if len(counts) < 2:
        return
    advice = "is the same checkout everywhere?" if what == SOURCE else "install the same on all"
    (usual, most), (_, next_most), *_ = counts
    if most == next_most:
        each = [
            f"{version or 'none'} on {format_names([n for n, v in have.items() if v == version])}"
            for version, _ in counts
        ]
        yield Problem(category=category, nodes=(), message=f"{what}: {', '.join(each)}: {advice}")
        return
    others = f"{'the others have' if len(counts) == 2 else 'most have'} {usual or 'none'}"
    for name, version in have.items():
        if version != usual:
            yield Problem(
                category=category,
                nodes=(name,),
                message=f"{f'no {what}' if version is None else f'{what} {version}'}, {others}: {advice}",
            )


def _find_single_node_problems(report: NodeReport, gpus_held: float) -> Iterator[tuple[str, str]]:
    """Yield category and message of the problems visible in a node's own report."""
    if report.clock is not None:
        ahead = report.clock.ahead_seconds
        if abs(ahead) - report.clock.uncertainty_seconds > MAX_CLOCK_SKEW_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            yield CLOCK, f"its clock is {abs(ahead):.1f} s {way} the driver's; is it synchronized?"
    facts = report.facts
    if facts is None:
        return
    if facts.memory_bytes < MIN_MEMORY:
        yield MEMORY, f"needs {MIN_MEMORY / GIB:g} GiB of free memory, got {facts.memory_bytes / GIB:.1f}"
    common = facts.shared_memory_bytes or 0
    if common < MIN_SHARED_MEMORY:
        yield (
            SHARED_MEMORY,
            f"needs {MIN_SHARED_MEMORY / 2**20:.0f} MiB of free shared memory in /dev/shm, got {common / 2**20:.0f}: "
            "in a container, start it with --shm-size",
        )
    if len(facts.gpus) < report.gpus:
        yield GPUS, f"the GPU driver reports {len(facts.gpus)} GPUs, Ray was started with {report.gpus}"
    if not gpus_held:
        yield from ((GPU_MEMORY, message) for message in _busy_gpus(facts))
    if facts.gloo.address is None:
        yield GLOO, f"GLOO_SOCKET_IFNAME is {facts.gloo.name}, an interface that this node does not have"
    yield from ((path.key, path.trouble) for path in facts.paths if path.trouble is not None)


def _busy_gpus(facts: NodeFacts) -> Iterator[str]:
    for gpu in facts.gpus:
        if gpu.used_bytes is not None and gpu.used_bytes > IDLE_GPU_BYTES:
            total = "" if gpu.memory_bytes is None else f" of {gpu.memory_bytes / GIB:.1f}"
            yield (
                f"GPU {gpu.index} ({gpu.name}) has {gpu.used_bytes / GIB:.1f}{total} GiB in use, and none of this "
                "cluster's processes uses it"
            )


def _find_loopback_problems(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    if len({r.address for r in reports}) < 2:
        return  # one host: all nodes can reach its loopback
    for report in reports:
        gloo = report.facts and report.facts.gloo
        if gloo and gloo.is_loopback:
            why = "set by GLOO_SOCKET_IFNAME" if gloo.is_chosen else "to which its host name resolves"
            yield Problem(
                category=GLOO,
                nodes=(report.name,),
                message=f"gloo will listen on {gloo.address}, {why}, which no other node can reach: set "
                f"GLOO_SOCKET_IFNAME to the interface of {report.address} before starting Ray",
            )


def _find_size_problems(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    """Find paths whose size in bytes differs between nodes."""
    paths = [(r.name, path) for r in reports if r.facts for path in r.facts.paths]
    for key in dict.fromkeys(path.key for _, path in paths):
        seen = {name: path for name, path in paths if path.key == key and path.num_bytes is not None}
        counts = Counter(path.num_bytes for path in seen.values()).most_common()
        if len(counts) < 2:
            continue
        usual = counts[0][0] if counts[0][1] > counts[1][1] else None
        for name, path in seen.items():
            if path.num_bytes != usual:
                others = "other nodes have another number" if usual is None else f"most have {usual}"
                yield Problem(
                    category=key,
                    nodes=(name,),
                    message=f"{key} {path.path} has {path.num_bytes} bytes, {others}; is the file system shared?",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableAddress:
    """An address at which one node cannot reach another."""

    source: str
    """Name of the node that connects."""
    target: str
    """Name of the node that should respond."""
    address: str
    """Host and port of `target`."""
    reason: str


def find_reachability_problems(unreached: Sequence[UnreachableAddress], num_nodes: int) -> list[Problem]:
    """Return one problem per unreachable address; for a node that reaches no other, one for all addresses."""
    targets: dict[str, set[str]] = {}
    for each in unreached:
        targets.setdefault(each.source, set()).add(each.target)
    cut_off = {source for source, missed in targets.items() if num_nodes > 2 and len(missed) == num_nodes - 1}
    found = []
    for each in unreached:
        if each.source in cut_off:
            message = f"cannot reach any other node: {each.reason}"
        elif each.target in cut_off:
            continue  # the cut-off node is reported as a source
        else:
            message = f"cannot reach node {each.target} at {each.address}: {each.reason}"
        found.append(Problem(category=REACH, nodes=(each.source,), message=message))
    return merge_problems(found)


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
