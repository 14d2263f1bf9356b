"""Nodes of a Ray cluster, existing or planned."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RANK_LABEL = "megarl.node-rank"
"""Ray node label: rank of the node among those that were launched together."""

HET_GROUP_LABEL = "megarl.het-group"
"""Ray node label: component of a heterogeneous Slurm job that the node belongs to."""

DOMAIN_LABEL = "megarl.nvlink-domain"
"""Ray node label: NVLink domain of the node's GPUs."""

MAX_AGE_SECONDS = 0.2
"""How old the answer of `RecentNodes` may be: short, because a process that starts on a lost node waits in vain."""

GPU_LABEL = "ray.io/accelerator-type"
"""Ray node label: type of the node's GPUs, which Ray itself sets, such as `H100`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One node, as Ray reports it."""

    id: str
    address: str
    hostname: str
    cpus: int
    gpus: int
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Host name with address and node rank, which distinguish several nodes on one machine."""
        rank = self.labels.get(RANK_LABEL)
        return f"{self.hostname} ({self.address}{'' if rank is None else f', node rank {rank}'})"

    @property
    def domain(self) -> str:
        """NVLink domain of the node; a node without the label is its own domain."""
        return self.labels.get(DOMAIN_LABEL, self.id)

    def slots(self, device: str) -> int:
        """Return the number of ranks that fit: one per GPU, or one per CPU slot."""
        return self.gpus if device == "cuda" else self.cpus


def cluster_nodes() -> list[ClusterNode]:
    """Return the nodes that are alive, by node rank; nodes without a rank follow, by host name and address."""
    import ray  # imported here, because planning for a future cluster needs no Ray

    nodes = [_node(entry) for entry in ray.nodes() if entry["Alive"]]
    return sorted(nodes, key=_order)


class RecentNodes:
    """The nodes that are alive, asked for once for all processes that start or are lost together."""

    def __init__(self) -> None:
        """Ask at the first use."""
        self._by_id: Mapping[str, ClusterNode] = {}
        self._asked_at = -math.inf

    def by_id(self) -> Mapping[str, ClusterNode]:
        """Return the nodes as of at most `MAX_AGE_SECONDS` ago."""
        if time.monotonic() - self._asked_at > MAX_AGE_SECONDS:
            self._by_id, self._asked_at = {node.id: node for node in cluster_nodes()}, time.monotonic()
        return self._by_id


def planned_nodes(nodes: Sequence[int], *, gpus: Sequence[int], cpus: Sequence[int]) -> list[ClusterNode]:
    """Return the nodes that will be requested from a scheduler, in the order of the job's components.

    Args:
        nodes: number of nodes of each component of the (heterogeneous) job.
        gpus: number of GPUs per node of each component.
        cpus: number of CPU slots per node of each component.
    """
    component_of_node = [part for part, count in enumerate(nodes) for _ in range(count)]
    return [
        ClusterNode(
            id=str(rank),
            address="",
            hostname=f"node{rank}",
            cpus=cpus[part],
            gpus=gpus[part],
            labels={RANK_LABEL: str(rank), HET_GROUP_LABEL: str(part)},
        )
        for rank, part in enumerate(component_of_node)
    ]


def nodes_for_light_workers() -> list[ClusterNode]:
    """Return the nodes for agents and reward functions: those without GPUs, or all if every node has GPUs."""
    nodes = cluster_nodes()
    return [node for node in nodes if not node.gpus] or nodes


def _node(entry: Mapping[str, Any]) -> ClusterNode:
    resources = entry["Resources"]
    return ClusterNode(
        id=entry["NodeID"],
        address=entry["NodeManagerAddress"],
        hostname=entry["NodeManagerHostname"],
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        labels=entry.get("Labels", {}),
    )


def _order(node: ClusterNode) -> tuple[int, int, str, tuple[int, ...] | tuple[()], str]:
    rank = node.labels.get(RANK_LABEL, "")
    numbers = node.address.split(".")
    address = tuple(int(n) for n in numbers) if all(n.isdigit() for n in numbers) else ()
    return (0, int(rank), "", address, node.id) if rank.isdigit() else (1, 0, node.hostname, address, node.id)
