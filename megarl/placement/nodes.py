"""The machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

RANK_LABEL = "megarl.node-rank"
"""Ray's label of a node's place among those that were launched together."""

DOMAIN_LABEL = "megarl.nvlink-domain"
"""Ray's label of the NVLink domain that a node's GPUs are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine, as Ray reports it."""

    id: str
    address: str
    hostname: str
    cpus: int
    gpus: int
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As people know it, with what tells nodes of one machine apart."""
        rank = self.labels.get(RANK_LABEL)
        return f"{self.hostname} ({self.address}{'' if rank is None else f', node rank {rank}'})"

    @property
    def domain(self) -> str:
        """Of NVLink; a node that names none is one by itself."""
        return self.labels.get(DOMAIN_LABEL, self.id)

    def slots(self, device: str) -> int:
        """How many ranks fit: one a GPU, or one a CPU slot."""
        return self.gpus if device == "cuda" else self.cpus


def cluster_nodes() -> list[ClusterNode]:
    """Machines that are alive, in the order of their ranks; those without one behind, by address."""
    nodes = [_node(entry) for entry in ray.nodes() if entry["Alive"]]
    return sorted(nodes, key=_order)


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
