"""What is wrong with a cluster, from what its nodes say of themselves: one sentence a problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.preflight.cluster.node_report import SOURCE, NodeFacts, NodeReport

GIB = 2**30

CLOCK_SECONDS = 1.0
"""By which clocks may differ: beyond, logs and timeouts lie."""

LEAST_MEMORY = 2 * GIB
"""Free: what Ray and two or three processes with torch in them take."""
LEAST_SHARED_MEMORY = 512 * 2**20
"""Free: Ray's object store and weight buckets."""

IDLE_GPU = GIB
"""Bytes that may be in use on a GPU that nobody uses: the driver's own."""

NAMES = 3
"""Nodes that are named where a sentence is about many."""

CLOCK, MEMORY, SHARED_MEMORY = "clock ahead", "memory free", "/dev/shm free"  # noqa: S108 -- a name
GPUS, GPU_MEMORY, GLOO = "GPUs", "GPU memory in use", "gloo"
ANSWER, REACH, REDUCTION = "answer", "reach", "reduction"
"""What a problem may be about, beside packages and paths: columns of the table of nodes."""

BUILDS = ("torch", "NCCL")
"""Packages that differ between machines with GPUs and those without, and may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is wrong, with the nodes that have it."""

    about: str
    """The column of the table of nodes that shows it."""
    nodes: tuple[str, ...]
    """By name; empty where it is of the cluster as a whole."""
    says: str


def sentences(problems: Sequence[Problem], num_nodes: int) -> list[str]:
    """One for each problem that nodes have."""
    return [f"{_subject(p.nodes, num_nodes)}{p.says}" for p in problems]


def _subject(names: Sequence[str], num_nodes: int) -> str:
    if not names:
        return ""
    if len(names) == 1:
        return f"node {names[0]}: "
    if len(names) == num_nodes:
        return f"all {num_nodes} nodes: "
    return f"nodes {listed(names)}: "


def listed(names: Sequence[str]) -> str:
    """All names, or where they are many the first and how many more."""
    if len(names) <= NAMES + 1:
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{', '.join(names[:NAMES])} and {len(names) - NAMES} more"


def find_problems(reports: Sequence[NodeReport], *, gpus_held: float = 0.0) -> list[Problem]:
    """All that the reports show to be wrong; nodes that have the same problem share one.

    Args:
        gpus_held: by processes of the Ray cluster, all nodes together.
    """
    found = [Problem(about=ANSWER, nodes=(r.name,), says=r.failure) for r in reports if r.failure is not None]
    found += _versions(reports)
    for report in reports:
        found += [Problem(about=about, nodes=(report.name,), says=says) for about, says in _alone(report, gpus_held)]
    found += _loopbacks(reports)
    found += _sizes(reports)
    return merged(found)


def merged(problems: Sequence[Problem]) -> list[Problem]:
    """One for each thing that is said, with all nodes of which it is."""
    nodes: dict[tuple[str, str], dict[str, None]] = {}
    for problem in problems:
        nodes.setdefault((problem.about, problem.says), {}).update(dict.fromkeys(problem.nodes))
    return [Problem(about=about, nodes=tuple(names), says=says) for (about, says), names in nodes.items()]


def _versions(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    answered = [r for r in reports if r.versions]
    for package in dict.fromkeys(package for r in answered for package in r.versions):
        have = {r.name: r.versions.get(package) for r in answered}
        if package not in BUILDS:
            yield from _differing(package, have, package)
            continue
        # 2.13.0+cpu beside 2.13.0+cu130: the same, on a machine of another kind
        public = {name: None if v is None else v.partition("+")[0] for name, v in have.items()}
        across = [] if package == "NCCL" else list(_differing(package, public, package))
        for with_gpus in (True, False):
            of_kind = {r.name: have[r.name] for r in answered if bool(r.gpus) == with_gpus}
            across = across or list(_differing(package, of_kind, package))
        yield from across


def _differing(about: str, have: Mapping[str, str | None], what: str) -> Iterator[Problem]:
    """For each version but that of most nodes, or where no version is of most, for all of them together."""
    counts = Counter(have.values()).most_common()
    if len(counts) < 2:
        return
    advice = "is the same checkout everywhere?" if what == SOURCE else "install the same on all"
    (usual, most), (_, next_most), *_ = counts
    if most == next_most:
        each = [
            f"{version or 'none'} on {listed([n for n, v in have.items() if v == version])}" for version, _ in counts
        ]
        yield Problem(about=about, nodes=(), says=f"{what}: {', '.join(each)}: {advice}")
        return
    others = f"{'the others have' if len(counts) == 2 else 'most have'} {usual or 'none'}"
    for name, version in have.items():
        if version != usual:
            yield Problem(
                about=about,
                nodes=(name,),
                says=f"{f'no {what}' if version is None else f'{what} {version}'}, {others}: {advice}",
            )


def _alone(report: NodeReport, gpus_held: float) -> Iterator[tuple[str, str]]:
    """What can be said of a node without the others."""
    if report.clock is not None:
        ahead = report.clock.ahead_seconds
        if abs(ahead) - report.clock.uncertainty_seconds > CLOCK_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            yield CLOCK, f"its clock is {abs(ahead):.1f} s {way} that of the asking node; is it synchronised?"
    facts = report.facts
    if facts is None:
        return
    if facts.memory_bytes < LEAST_MEMORY:
        yield MEMORY, f"needs {LEAST_MEMORY / GIB:g} GiB of free memory, got {facts.memory_bytes / GIB:.1f}"
    shared = facts.shared_memory_bytes or 0
    if shared < LEAST_SHARED_MEMORY:
        yield (
            SHARED_MEMORY,
            f"needs {LEAST_SHARED_MEMORY / 2**20:.0f} MiB of free shared memory in /dev/shm, got {shared / 2**20:.0f}: "
            "in a container, start it with --shm-size",
        )
    if len(facts.gpus) < report.gpus:
        yield GPUS, f"the driver finds {len(facts.gpus)} GPUs, Ray was told of {report.gpus}"
    if not gpus_held:
        yield from ((GPU_MEMORY, says) for says in _busy_gpus(facts))
    if facts.gloo.address is None:
        yield GLOO, f"GLOO_SOCKET_IFNAME is {facts.gloo.name}, an interface that it does not have"
    yield from ((path.key, path.trouble) for path in facts.paths if path.trouble is not None)


def _busy_gpus(facts: NodeFacts) -> Iterator[str]:
    for gpu in facts.gpus:
        if gpu.used_bytes is not None and gpu.used_bytes > IDLE_GPU:
            total = "" if gpu.memory_bytes is None else f" of {gpu.memory_bytes / GIB:.1f}"
            yield (
                f"GPU {gpu.index} ({gpu.name}) has {gpu.used_bytes / GIB:.1f}{total} GiB in use, and none of this "
                "cluster's processes uses it"
            )


def _loopbacks(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    if len({r.address for r in reports}) < 2:
        return  # one machine: its loopback leads everywhere
    for report in reports:
        gloo = report.facts and report.facts.gloo
        if gloo and gloo.is_loopback:
            why = "as GLOO_SOCKET_IFNAME says" if gloo.is_chosen else "to which its own name resolves"
            yield Problem(
                about=GLOO,
                nodes=(report.name,),
                says=f"gloo will use {gloo.address}, {why}, and no other node reaches it there: set "
                f"GLOO_SOCKET_IFNAME to the interface of {report.address} before Ray is started",
            )


def _sizes(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    """Of paths that every node sees, and not alike."""
    paths = [(r.name, path) for r in reports if r.facts for path in r.facts.paths]
    for key in dict.fromkeys(path.key for _, path in paths):
        seen = {name: path for name, path in paths if path.key == key and path.num_bytes is not None}
        counts = Counter(path.num_bytes for path in seen.values()).most_common()
        if len(counts) < 2:
            continue
        usual = counts[0][0] if counts[0][1] > counts[1][1] else None
        for name, path in seen.items():
            if path.num_bytes != usual:
                others = "others have another number" if usual is None else f"most have {usual}"
                yield Problem(
                    about=key,
                    nodes=(name,),
                    says=f"{key} {path.path} has {path.num_bytes} bytes, {others}; is the file system shared?",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """An address at which a node does not find another."""

    source: str
    """Names of both."""
    target: str
    address: str
    """With the port."""
    reason: str


def unreached_problems(unreached: Sequence[Unreached], num_nodes: int) -> list[Problem]:
    """By address that some nodes do not get to; of a node that gets to no other, one for all of them."""
    targets: dict[str, set[str]] = {}
    for each in unreached:
        targets.setdefault(each.source, set()).add(each.target)
    cut_off = {source for source, missed in targets.items() if num_nodes > 2 and len(missed) == num_nodes - 1}
    found = []
    for each in unreached:
        if each.source in cut_off:
            says = f"cannot reach any other node: {each.reason}"
        elif each.target in cut_off:
            continue  # both ways are cut
        else:
            says = f"cannot reach node {each.target} at {each.address}: {each.reason}"
        found.append(Problem(about=REACH, nodes=(each.source,), says=says))
    return merged(found)
