"""The machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RANK_LABEL = "megarl.node-rank"
"""Ray's label of a node's place among those that were launched together."""

HET_GROUP_LABEL = "megarl.het-group"
"""Ray's label of the component of a heterogeneous Slurm job that a node is of."""

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
    import ray  # here, because a plan for machines that are not there yet needs no Ray

    nodes = [_node(entry) for entry in ray.nodes() if entry["Alive"]]
    return sorted(nodes, key=_order)


def planned_nodes(nodes: Sequence[int], *, gpus: Sequence[int], cpus: Sequence[int]) -> list[ClusterNode]:
    """Machines that a scheduler will be asked for, by the components of a heterogeneous job, in their order.

    Args:
        nodes: of each component.
        gpus: of each of its machines; likewise `cpus`.
    """
    of_component = [part for part, count in enumerate(nodes) for _ in range(count)]
    return [
        ClusterNode(
            id=str(rank),
            address="",
            hostname=f"node{rank}",
            cpus=cpus[part],
            gpus=gpus[part],
            labels={RANK_LABEL: str(rank), HET_GROUP_LABEL: str(part)},
        )
        for rank, part in enumerate(of_component)
    ]


def light_nodes() -> list[ClusterNode]:
    """Where agents and reward functions run: machines without GPUs, or all where each has some."""
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
