from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from megarl.preflight.cluster.findings import find_problems
from megarl.preflight.cluster.node_report import NodeReport
from megarl.preflight.cluster.node_table import nodes_table
from tests.preflight.cluster.reports import GIB, path, report


def render(*reports: NodeReport, color: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=color, color_system="standard" if color else None)
    console.print(nodes_table(reports, find_problems(reports)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_common_values_are_shown_once() -> None:
    lines = render(*(report(name, memory_bytes=(100 + i) * GIB) for i, name in enumerate("abc")))
    assert lines[0] == "all 3 nodes"
    values = {line[:15].strip(): line[15:].strip() for line in lines[1:]}
    assert values["torch"] == "2.13.0+cpu"
    assert values["memory free"] == "100.0 to 102.0 GiB"
    assert values["cores"] == "8"
    assert values["NCCL"] == values["GPUs"] == "none"
    assert values["clock ahead"] == "1.0 ms"
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
