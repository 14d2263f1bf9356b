from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from megarl.preflight.cluster.findings import find_problems
from megarl.preflight.cluster.node_report import NodeReport
from megarl.preflight.cluster.node_table import nodes_table
from tests.preflight.cluster.reports import GIB, path, report


def shown(*reports: NodeReport, color: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=color, color_system="standard" if color else None)
    console.print(nodes_table(reports, find_problems(reports)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_what_all_nodes_have_is_said_once() -> None:
    lines = shown(*(report(name, memory_bytes=(100 + i) * GIB) for i, name in enumerate("abc")))
    assert lines[0] == "all 3 nodes"
    said = {line[:15].strip(): line[15:].strip() for line in lines[1:]}
    assert said["torch"] == "2.13.0+cpu"
    assert said["memory free"] == "100.0 to 102.0 GiB"
    assert said["cores"] == "8"
    assert said["NCCL"] == said["GPUs"] == "none"
    assert said["clock ahead"] == "1.0 ms"
    assert not any(line.startswith("node") for line in lines)


def test_gpus_are_said_of_machines_that_have_them() -> None:
    lines = shown(report("a", gpus=8), report("b", gpus=8))
    said = {line[:19].strip(): line[19:].strip() for line in lines[1:]}
    assert (said["GPUs"], said["driver"], said["GPU memory in use"]) == ("8 H200", "570.1", "0.0 GiB")


def test_what_differs_is_said_by_node_and_what_is_wrong_is_marked() -> None:
    blind = report("b", versions={"torch": "2.12.0"}, paths=(path(trouble="cannot see it"),))
    seeing = [report(name, paths=(path(),)) for name in "acdefg"]
    lines = shown(*seeing, blind)
    at = lines.index("")
    assert [line.split() for line in lines[at + 1 :]] == [
        ["node", "torch", "data.path"],
        ["a,", "c,", "d", "and", "3", "more", "2.13.0+cpu", "/x"],
        ["b", "!", "2.12.0", "!", "no"],
    ]
    assert not any(line.startswith(("torch", "data.path")) for line in lines[:at])
    assert any("\x1b[31m! 2.12.0" in line for line in shown(*seeing, blind, color=True))


def test_quantities_are_shown_by_node_where_one_is_wrong() -> None:
    lines = shown(report("a"), report("b", memory_bytes=GIB))
    assert [line.split() for line in lines[-3:]] == [
        ["node", "memory", "free"],
        ["a", "100.0", "GiB"],
        ["b", "!", "1.0", "GiB"],
    ]


def test_a_node_that_does_not_answer() -> None:
    lines = shown(report("a"), replace(NodeReport(name="b", address="10.0.0.2", gpus=0), failure="it is gone"))
    assert lines[0] == "all 2 nodes"
    header, a, b = lines[-3:]
    assert header.split()[:2] == ["node", "answer"]
    assert a.split()[:3] == ["a", "ok", "3.11.2"]
    assert b.split()[:4] == ["b", "!", "failed", "?"]
