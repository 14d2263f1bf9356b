"""Find the problems of a cluster in the reports of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.preflight.cluster.node_report import SOURCE, NodeFacts, NodeReport

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
