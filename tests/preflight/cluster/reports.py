"""Reports of nodes without problems, for tests to modify."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.placement.hardware import Gpu
from megarl.preflight.cluster.node_report import SOURCE, Clock, NodeFacts, NodeReport, PathReport
from megarl.preflight.cluster.reachability import Interface

GIB = 2**30

VERSIONS: dict[str, str | None] = {
    "Python": "3.11.2",
    "megarl": "0.1.0",
    SOURCE: "0a1b2c3d",
    "torch": "2.13.0+cpu",
    "ray": "2.60.0",
    "NCCL": None,
}


def report(
    name: str,
    *,
    versions: dict[str, str | None] | None = None,
    gpus: int = 0,
    cards: tuple[Gpu, ...] | None = None,
    **facts: Any,
) -> NodeReport:
    """Make a report; the last digit of the address is the position of `name` in the alphabet."""
    address = f"10.0.0.{ord(name) - ord('a') + 1}"
    return NodeReport(
        name=name,
        address=address,
        gpus=gpus,
        versions=VERSIONS | (versions or {}),
        clock=Clock(ahead_seconds=0.001, uncertainty_seconds=0.002),
        facts=replace(
            NodeFacts(
                cores=8,
                memory_bytes=100 * GIB,
                shared_memory_bytes=50 * GIB,
                gpus=tuple(gpu(i) for i in range(gpus)) if cards is None else cards,
                gloo=Interface(name="eth0", address=address, is_chosen=True),
                nccl="=eth0",
                paths=(),
            ),
            **facts,
        ),
    )


def gpu(index: int, used_bytes: int | None = 4 * 2**20) -> Gpu:
    """Make a GPU, idle by default."""
    return Gpu(index=index, name="H200", driver="570.1", memory_bytes=140 * GIB, used_bytes=used_bytes)


def path(key: str = "data.path", num_bytes: int | None = 7, trouble: str | None = None) -> PathReport:
    """Make a report on the path /x."""
    return PathReport(key=key, path="/x", num_bytes=num_bytes, trouble=trouble)
