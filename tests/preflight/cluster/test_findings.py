from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.preflight.cluster.findings import (
    GPU_MEMORY,
    Problem,
    UnreachableAddress,
    find_problems,
    find_reachability_problems,
    format_names,
    messages,
)
from megarl.preflight.cluster.node_report import SOURCE, Clock, NodeReport
from megarl.preflight.cluster.reachability import Interface
from tests.preflight.cluster.reports import GIB, gpu, path, report

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
    assert [format_names("abcdef"[:n]) for n in (1, 2, 4, 5, 6)] == [
        "a",
        "a and b",
        "a, b, c and d",
        "a, b, c and 2 more",
        "a, b, c and 3 more",
    ]
