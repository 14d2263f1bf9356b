"""Problems that the reports of nodes show, and the table of the nodes."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megarl.cluster.placement.hardware import Gpu
from megarl.controller.preflight.cluster_findings import (
    GPU_MEMORY,
    Problem,
    UnreachableAddress,
    find_problems,
    find_reachability_problems,
    format_names,
    messages,
    nodes_table,
)
from megarl.controller.preflight.node_report import SOURCE, Clock, Interface, NodeFacts, NodeReport, PathReport

GIB = 2**30

VERSIONS: dict[str, str | None] = {
    "Python": "3.11.2", "megarl": "0.1.0", SOURCE: "0a1b2c3d", "torch": "2.13.0+cpu", "ray": "2.60.0", "NCCL": None
}  # fmt: skip


def report(name: str, *, versions: Any = None, gpus: int = 0, cards: Any = None, **changes: Any) -> NodeReport:
    """Make a report; the last digit of the address is the position of `name` in the alphabet."""
    address = f"10.0.0.{ord(name) - ord('a') + 1}"
    gloo = Interface(name="eth0", address=address, is_chosen=True)
    cards = tuple(gpu(i) for i in range(gpus)) if cards is None else cards
    facts = NodeFacts(
        cores=8, memory_bytes=100 * GIB, shared_memory_bytes=50 * GIB, gpus=cards, gloo=gloo, nccl="=eth0", paths=()
    )
    clock = Clock(ahead_seconds=0.001, uncertainty_seconds=0.002)
    content: dict[str, Any] = {
        "versions": VERSIONS | (versions or {}),
        "clock": clock,
        "facts": replace(facts, **changes),
    }
    return NodeReport(name=name, address=address, gpus=gpus, **content)


def gpu(index: int, used_bytes: int | None = 4 * 2**20) -> Gpu:
    """Make a GPU, idle by default."""
    return Gpu(
        index=index, uuid=f"GPU-{index}", name="H200", driver="570.1", memory_bytes=140 * GIB, used_bytes=used_bytes
    )


def path(key: str = "data.path", num_bytes: int | None = 7, trouble: str | None = None) -> PathReport:
    """Make a report on the path /x."""
    return PathReport(key=key, path="/x", num_bytes=num_bytes, trouble=trouble)


THREE = [report(name) for name in "abc"]


def find_messages(*reports: NodeReport, gpus_held: float = 0.0) -> list[str]:
    return messages(find_problems(reports, gpus_held=gpus_held), len(reports))


def test_healthy_nodes_have_no_problems() -> None:
    assert find_messages(*THREE) == []
    assert find_messages(*(report(name, gpus=8, paths=(path(),)) for name in "abcd")) == []
    assert find_messages() == []


@pytest.mark.parametrize(
    ("package", "usual", "other", "message"),
    [
        ("torch", "2.13.0", "2.12.0", "torch 2.12.0, the others have 2.13.0: install the same on all"),
        ("torch", "2.13.0", None, "no torch, the others have 2.13.0: install the same on all"),
        ("ray", None, "2.60.0", "ray 2.60.0, the others have none: install the same on all"),
        (SOURCE, "aa", "bb", "megarl source bb, the others have aa: is the same checkout everywhere?"),
    ],
)
def test_a_version_that_deviates_from_most_is_reported(
    package: str, usual: str | None, other: str | None, message: str
) -> None:
    nodes = [report(name, versions={package: usual}) for name in "acd"]
    assert find_messages(*nodes, report("b", versions={package: other})) == [f"node b: {message}"]


def test_nodes_with_the_same_deviating_version_share_a_message() -> None:
    nodes = [report(name, versions={"ray": "2.60.0" if name > "e" else "2.59.0"}) for name in "abcdefghijklmnop"]
    assert find_messages(*nodes) == [
        "nodes a, b, c and 2 more: ray 2.59.0, the others have 2.60.0: install the same on all"
    ]
    several = [*THREE, report("d", versions={"ray": "1"}), report("e", versions={"ray": "2"})]
    assert find_messages(*several) == [
        "node d: ray 1, most have 2.60.0: install the same on all",
        "node e: ray 2, most have 2.60.0: install the same on all",
    ]


def test_without_a_most_common_version_all_are_listed() -> None:
    two = report("a", versions={"torch": "2.12.0"}), report("b", versions={"torch": None})
    assert find_messages(*two) == ["torch: 2.12.0 on a, none on b: install the same on all"]
    four = [report(name, versions={"torch": "2.12.0" if name in "ac" else "2.13.0"}) for name in "abcd"]
    assert find_messages(*four) == ["torch: 2.12.0 on a and c, 2.13.0 on b and d: install the same on all"]


def test_torch_builds_may_differ_between_nodes_with_and_without_gpus() -> None:
    head, *others = (report(name, gpus=0 if name == "a" else 8) for name in "abcd")
    cuda = [replace(r, versions={**r.versions, "torch": "2.13.0+cu130", "NCCL": "2.28"}) for r in others]
    assert find_messages(head, *cuda) == []
    old = replace(head, versions={**head.versions, "torch": "2.12.0+cpu"})
    assert find_messages(old, *cuda) == ["node a: torch 2.12.0, the others have 2.13.0: install the same on all"]
    other_build = replace(cuda[0], versions={**cuda[0].versions, "torch": "2.13.0+cu126", "NCCL": "2.27"})
    assert find_messages(head, other_build, *cuda[1:]) == [
        "node b: torch 2.13.0+cu126, the others have 2.13.0+cu130: install the same on all",
        "node b: NCCL 2.27, the others have 2.28: install the same on all",
    ]


def test_a_node_that_does_not_reply_is_not_compared() -> None:
    silent = NodeReport(name="d", address="10.0.0.4", gpus=8, failure="no answer within 60 s")
    assert find_messages(*THREE, silent) == ["node d: no answer within 60 s"]


@pytest.mark.parametrize(
    ("ahead", "uncertainty", "message"),
    [
        (1.5, 0.1, "its clock is 1.5 s ahead of the driver's; is it synchronized?"),
        (-90.04, 0.1, "its clock is 90.0 s behind the driver's; is it synchronized?"),
        (0.9, 0.1, None),
        (-1.5, 0.6, None),  # within the uncertainty of a slow request
    ],
)
def test_clock_offsets(ahead: float, uncertainty: float, message: str | None) -> None:
    late = replace(THREE[1], clock=Clock(ahead_seconds=ahead, uncertainty_seconds=uncertainty))
    assert find_messages(THREE[0], late, THREE[2]) == ([f"node b: {message}"] if message else [])


def test_too_little_memory() -> None:
    assert find_messages(report("a", memory_bytes=GIB), report("b", shared_memory_bytes=2**20)) == [
        "node a: needs 2 GiB of free memory, got 1.0",
        "node b: needs 512 MiB of free shared memory in /dev/shm, got 1: in a container, start it with --shm-size",
    ]
    assert len(find_messages(report("a", shared_memory_bytes=None))) == 1


def test_fewer_gpus_than_ray_was_started_with() -> None:
    lost = replace(report("b", gpus=7), gpus=8)
    assert find_messages(report("a", gpus=8), lost) == ["node b: the GPU driver reports 7 GPUs, Ray was started with 8"]


def test_gpus_in_use_by_other_processes() -> None:
    used = replace(report("b", cards=(gpu(0, None), gpu(1, 30 * GIB))), gpus=2)
    (problem,) = find_problems([report("a", gpus=2), used])
    assert problem == Problem(
        category=GPU_MEMORY,
        nodes=("b",),
        message="GPU 1 (H200) has 30.0 of 140.0 GiB in use, and none of this cluster's processes uses it",
    )
    assert find_messages(report("a", gpus=2), used, gpus_held=1.0) == []


def test_gloo_interfaces() -> None:
    none = report("b", gloo=Interface(name="eth9", address=None, is_chosen=True))
    assert find_messages(report("a"), none) == [
        "node b: GLOO_SOCKET_IFNAME is eth9, an interface that this node does not have"
    ]
    loopback = Interface(name="lo", address="127.0.1.1", is_chosen=False)
    assert find_messages(report("a"), report("b", gloo=loopback)) == [
        "node b: gloo will listen on 127.0.1.1, to which its host name resolves, which no other node can reach: set "
        "GLOO_SOCKET_IFNAME to the interface of 10.0.0.2 before starting Ray"
    ]
    one_machine = replace(report("b", gloo=loopback), address="10.0.0.1")
    assert find_messages(report("a", gloo=loopback), one_machine) == []


def test_paths_that_a_node_cannot_see() -> None:
    trouble = "cannot see data.path /x; is the file system shared?"
    blind = report("b", paths=(path(num_bytes=None, trouble=trouble), path("model.path")))
    seeing = [report(name, paths=(path(), path("model.path"))) for name in "ac"]
    assert find_messages(*seeing, blind) == [f"node b: {trouble}"]
    assert find_messages(*(replace(blind, name=name) for name in "abc")) == [f"all 3 nodes: {trouble}"]


def test_files_that_differ_between_nodes() -> None:
    nodes = [report(name, paths=(path(num_bytes=8 if name == "b" else 7),)) for name in "abc"]
    assert find_messages(*nodes) == ["node b: data.path /x has 8 bytes, most have 7; is the file system shared?"]
    assert find_messages(*nodes[:2]) == [
        "node a: data.path /x has 7 bytes, other nodes have another number; is the file system shared?",
        "node b: data.path /x has 8 bytes, other nodes have another number; is the file system shared?",
    ]


def unreached(source: str, target: str, reason: str = "timed out") -> UnreachableAddress:
    return UnreachableAddress(source=source, target=target, address=f"{target}:7", reason=reason)


def test_nodes_that_cannot_reach_each_other() -> None:
    two = find_reachability_problems([unreached("b", "a")], 2)
    assert messages(two, 2) == ["node b: cannot reach node a at a:7: timed out"]
    hidden = find_reachability_problems([unreached(source, "a") for source in "bcdefg"], 8)
    assert messages(hidden, 8) == ["nodes b, c, d and 3 more: cannot reach node a at a:7: timed out"]


def test_a_node_that_is_cut_off_is_reported_once() -> None:
    pairs = [unreached("a", target) for target in "bcd"] + [unreached(source, "a") for source in "bcd"]
    assert messages(find_reachability_problems(pairs, 4), 4) == ["node a: cannot reach any other node: timed out"]


def test_long_lists_of_names_are_shortened() -> None:
    shortened = ["a", "a and b", "a, b, c and d", "a, b, c and 2 more", "a, b, c and 3 more"]
    assert [format_names("abcdef"[:n]) for n in (1, 2, 4, 5, 6)] == shortened


def render(*reports: NodeReport, color: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=color, color_system="standard" if color else None)
    console.print(nodes_table(reports, find_problems(reports)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_common_values_are_shown_once() -> None:
    lines = render(*(report(name, memory_bytes=(100 + i) * GIB) for i, name in enumerate("abc")))
    assert lines[0] == "all 3 nodes"
    values = {line[:15].strip(): line[15:].strip() for line in lines[1:]}
    expected = {"torch": "2.13.0+cpu", "memory free": "100.0 to 102.0 GiB", "cores": "8", "NCCL": "none"}
    assert values.items() >= (expected | {"GPUs": "none", "clock ahead": "1.0 ms"}).items()
    assert not any(line.startswith("node") for line in lines)


def test_gpu_rows_are_shown_for_nodes_with_gpus() -> None:
    lines = render(report("a", gpus=8), report("b", gpus=8))
    values = {line[:19].strip(): line[19:].strip() for line in lines[1:]}
    assert (values["GPUs"], values["driver"], values["GPU memory in use"]) == ("8 H200", "570.1", "0.0 GiB")


def test_differing_values_are_shown_per_node_and_problems_marked() -> None:
    blind = report("b", versions={"torch": "2.12.0"}, paths=(path(trouble="cannot see it"),))
    seeing = [report(name, paths=(path(),)) for name in "acdefg"]
    lines = render(*seeing, blind)
    at = lines.index("")
    assert [line.split() for line in lines[at + 1 :]] == [
        ["node", "torch", "data.path"],
        ["a,", "c,", "d", "and", "3", "more", "2.13.0+cpu", "/x"],
        ["b", "!", "2.12.0", "!", "no"],
    ]
    assert not any(line.startswith(("torch", "data.path")) for line in lines[:at])
    assert any("\x1b[31m! 2.12.0" in line for line in render(*seeing, blind, color=True))


def test_a_quantity_with_a_problem_is_shown_per_node() -> None:
    lines = render(report("a"), report("b", memory_bytes=GIB))
    assert [line.split() for line in lines[-3:]] == [
        ["node", "memory", "free"],
        ["a", "100.0", "GiB"],
        ["b", "!", "1.0", "GiB"],
    ]


def test_a_node_without_a_reply_is_shown() -> None:
    lines = render(report("a"), replace(NodeReport(name="b", address="10.0.0.2", gpus=0), failure="it is gone"))
    assert lines[0] == "all 2 nodes"
    header, a, b = lines[-3:]
    assert header.split()[:2] == ["node", "answer"]
    assert a.split()[:3] == ["a", "ok", "3.11.2"]
    assert b.split()[:4] == ["b", "!", "failed", "?"]
