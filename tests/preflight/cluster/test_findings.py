from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.preflight.cluster.findings import (
    GPU_MEMORY,
    Problem,
    Unreached,
    find_problems,
    listed,
    sentences,
    unreached_problems,
)
from megarl.preflight.cluster.node_report import SOURCE, Clock, NodeReport
from megarl.preflight.cluster.reachability import Interface
from tests.preflight.cluster.reports import GIB, gpu, path, report

THREE = [report(name) for name in "abc"]


def says(*reports: NodeReport, gpus_held: float = 0.0) -> list[str]:
    return sentences(find_problems(reports, gpus_held=gpus_held), len(reports))


def test_nodes_that_have_nothing_wrong_with_them() -> None:
    assert says(*THREE) == []
    assert says(*(report(name, gpus=8, paths=(path(),)) for name in "abcd")) == []
    assert says() == []


@pytest.mark.parametrize(
    ("package", "usual", "other", "sentence"),
    [
        ("torch", "2.13.0", "2.12.0", "torch 2.12.0, the others have 2.13.0: install the same on all"),
        ("torch", "2.13.0", None, "no torch, the others have 2.13.0: install the same on all"),
        ("ray", None, "2.60.0", "ray 2.60.0, the others have none: install the same on all"),
        (SOURCE, "aa", "bb", "megarl source bb, the others have aa: is the same checkout everywhere?"),
    ],
)
def test_a_version_that_most_do_not_have(package: str, usual: str | None, other: str | None, sentence: str) -> None:
    nodes = [report(name, versions={package: usual}) for name in "acd"]
    assert says(*nodes, report("b", versions={package: other})) == [f"node b: {sentence}"]


def test_nodes_with_the_same_other_version_share_a_sentence() -> None:
    nodes = [report(name, versions={"ray": "2.60.0" if name > "e" else "2.59.0"}) for name in "abcdefghijklmnop"]
    assert says(*nodes) == ["nodes a, b, c and 2 more: ray 2.59.0, the others have 2.60.0: install the same on all"]
    several = [*THREE, report("d", versions={"ray": "1"}), report("e", versions={"ray": "2"})]
    assert says(*several) == [
        "node d: ray 1, most have 2.60.0: install the same on all",
        "node e: ray 2, most have 2.60.0: install the same on all",
    ]


def test_where_no_version_is_of_most_nodes_all_are_told() -> None:
    two = report("a", versions={"torch": "2.12.0"}), report("b", versions={"torch": None})
    assert says(*two) == ["torch: 2.12.0 on a, none on b: install the same on all"]
    four = [report(name, versions={"torch": "2.12.0" if name in "ac" else "2.13.0"}) for name in "abcd"]
    assert says(*four) == ["torch: 2.12.0 on a and c, 2.13.0 on b and d: install the same on all"]


def test_builds_of_torch_may_differ_between_machines_with_gpus_and_those_without() -> None:
    head, *others = (report(name, gpus=0 if name == "a" else 8) for name in "abcd")
    cuda = [replace(r, versions={**r.versions, "torch": "2.13.0+cu130", "NCCL": "2.28"}) for r in others]
    assert says(head, *cuda) == []
    old = replace(head, versions={**head.versions, "torch": "2.12.0+cpu"})
    assert says(old, *cuda) == ["node a: torch 2.12.0, the others have 2.13.0: install the same on all"]
    other_build = replace(cuda[0], versions={**cuda[0].versions, "torch": "2.13.0+cu126", "NCCL": "2.27"})
    assert says(head, other_build, *cuda[1:]) == [
        "node b: torch 2.13.0+cu126, the others have 2.13.0+cu130: install the same on all",
        "node b: NCCL 2.27, the others have 2.28: install the same on all",
    ]


def test_a_node_that_does_not_answer_is_compared_in_nothing() -> None:
    silent = NodeReport(name="d", address="10.0.0.4", gpus=8, failure="no answer within 60 s")
    assert says(*THREE, silent) == ["node d: no answer within 60 s"]


@pytest.mark.parametrize(
    ("ahead", "uncertainty", "sentence"),
    [
        (1.5, 0.1, "its clock is 1.5 s ahead of that of the asking node; is it synchronised?"),
        (-90.04, 0.1, "its clock is 90.0 s behind that of the asking node; is it synchronised?"),
        (0.9, 0.1, None),
        (-1.5, 0.6, None),  # asking took so long that it may be right
    ],
)
def test_clocks(ahead: float, uncertainty: float, sentence: str | None) -> None:
    late = replace(THREE[1], clock=Clock(ahead_seconds=ahead, uncertainty_seconds=uncertainty))
    assert says(THREE[0], late, THREE[2]) == ([f"node b: {sentence}"] if sentence else [])


def test_little_memory() -> None:
    assert says(report("a", memory_bytes=GIB), report("b", shared_memory_bytes=2**20)) == [
        "node a: needs 2 GiB of free memory, got 1.0",
        "node b: needs 512 MiB of free shared memory in /dev/shm, got 1: in a container, start it with --shm-size",
    ]
    assert len(says(report("a", shared_memory_bytes=None))) == 1


def test_gpus_that_ray_was_told_of_and_the_driver_does_not_find() -> None:
    lost = replace(report("b", gpus=7), gpus=8)
    assert says(report("a", gpus=8), lost) == ["node b: the driver finds 7 GPUs, Ray was told of 8"]


def test_gpus_that_somebody_uses() -> None:
    used = replace(report("b", cards=(gpu(0, None), gpu(1, 30 * GIB))), gpus=2)
    (problem,) = find_problems([report("a", gpus=2), used])
    assert problem == Problem(
        about=GPU_MEMORY,
        nodes=("b",),
        says="GPU 1 (H200) has 30.0 of 140.0 GiB in use, and none of this cluster's processes uses it",
    )
    assert says(report("a", gpus=2), used, gpus_held=1.0) == []


def test_interfaces_of_gloo() -> None:
    none = report("b", gloo=Interface(name="eth9", address=None, is_chosen=True))
    assert says(report("a"), none) == ["node b: GLOO_SOCKET_IFNAME is eth9, an interface that it does not have"]
    loopback = Interface(name="lo", address="127.0.1.1", is_chosen=False)
    assert says(report("a"), report("b", gloo=loopback)) == [
        "node b: gloo will use 127.0.1.1, to which its own name resolves, and no other node reaches it there: set "
        "GLOO_SOCKET_IFNAME to the interface of 10.0.0.2 before Ray is started"
    ]
    one_machine = replace(report("b", gloo=loopback), address="10.0.0.1")
    assert says(report("a", gloo=loopback), one_machine) == []


def test_paths_that_a_node_does_not_see() -> None:
    trouble = "cannot see data.path /x; is the file system shared?"
    blind = report("b", paths=(path(num_bytes=None, trouble=trouble), path("model.path")))
    seeing = [report(name, paths=(path(), path("model.path"))) for name in "ac"]
    assert says(*seeing, blind) == [f"node b: {trouble}"]
    assert says(*(replace(blind, name=name) for name in "abc")) == [f"all 3 nodes: {trouble}"]


def test_files_that_are_not_the_same_on_all_nodes() -> None:
    nodes = [report(name, paths=(path(num_bytes=8 if name == "b" else 7),)) for name in "abc"]
    assert says(*nodes) == ["node b: data.path /x has 8 bytes, most have 7; is the file system shared?"]
    assert says(*nodes[:2]) == [
        "node a: data.path /x has 7 bytes, others have another number; is the file system shared?",
        "node b: data.path /x has 8 bytes, others have another number; is the file system shared?",
    ]


def unreached(source: str, target: str, reason: str = "timed out") -> Unreached:
    return Unreached(source=source, target=target, address=f"{target}:7", reason=reason)


def test_nodes_that_do_not_reach_each_other() -> None:
    two = unreached_problems([unreached("b", "a")], 2)
    assert sentences(two, 2) == ["node b: cannot reach node a at a:7: timed out"]
    hidden = unreached_problems([unreached(source, "a") for source in "bcdefg"], 8)
    assert sentences(hidden, 8) == ["nodes b, c, d and 3 more: cannot reach node a at a:7: timed out"]


def test_a_node_that_is_cut_off_is_named_once() -> None:
    pairs = [unreached("a", target) for target in "bcd"] + [unreached(source, "a") for source in "bcd"]
    assert sentences(unreached_problems(pairs, 4), 4) == ["node a: cannot reach any other node: timed out"]


def test_many_names() -> None:
    assert [listed("abcdef"[:n]) for n in (1, 2, 4, 5, 6)] == [
        "a",
        "a and b",
        "a, b, c and d",
        "a, b, c and 2 more",
        "a, b, c and 3 more",
    ]
