"""Assigns nodes to pools: pure arithmetic, for an existing cluster and for a planned one.

The ranks of a pool fill one node after the other, and one NVLink domain after the other. Megatron's tensor-parallel
ranks are adjacent, so a tensor-parallel group shares a node; so do the ranks of an engine.

    nodes: 2, slots_per_node: 4, tp 2        node       a a a a  b b b b
                                             rank       0 1 2 3  4 5 6 7
                                             tp group   0 0 1 1  2 2 3 3
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.config.placement import PlacementConfig, PoolConfig, pool_key
from megarl.errors import ConfigError

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


def resolve_device(config: PlacementConfig, nodes: Sequence[ClusterNode]) -> str:
    """Return `cpu` or `cuda`, from the configuration and the GPUs of the cluster.

    Raises:
        ConfigError: cuda is configured and the cluster has too few GPUs.
    """
    gpus = sum(node.gpus for node in nodes)
    if config.device == "cuda" and gpus < config.total_slots:
        raise ConfigError(f"placement.device: cuda needs {config.total_slots} GPUs in the cluster, got {gpus}")
    if config.device == "auto":
        return "cuda" if gpus >= config.total_slots else "cpu"
    return config.device


def assign_nodes(
    pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode], device: str
) -> dict[str, list[ClusterNode]]:
    """Return the nodes of each pool: `pool.nodes` nodes, each for `slots_per_node` consecutive ranks.

    Among all assignments that satisfy every pool, this takes one with the smallest nodes, then with the earliest
    nodes, where earlier pools take precedence. Pools may share nodes.

    Args:
        pools: the pools by name.
        nodes: nodes in the order in which ranks should fill them.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: there are too few nodes for a pool; the message shows the arithmetic.
    """
    chosen = _solve(list(pools.values()), nodes, device)
    if chosen is None:
        raise ConfigError(_shortage_message(pools, nodes, device))
    order = _domain_order(nodes)
    found = {}
    for name, of_pool in zip(pools, chosen, strict=True):
        places = sorted(of_pool, key=lambda i: (order[nodes[i].domain], i))
        found[name] = [nodes[i] for i in places]
    return found


def _solve(pools: Sequence[PoolConfig], nodes: Sequence[ClusterNode], device: str) -> list[list[int]] | None:
    """Return the indices into `nodes` for each pool; None if there is no valid assignment."""
    return _solve_one_node(pools, nodes[0], device) if len(nodes) == 1 else _solve_program(pools, nodes, device)


def _solve_one_node(pools: Sequence[PoolConfig], node: ClusterNode, device: str) -> list[list[int]] | None:
    """Return the result of `_solve` for a cluster of one node: all pools share it, or there is no assignment."""
    fits = sum(pool.slots_per_node for pool in pools) <= node.slots(device) and all(
        pool.nodes == pool.nvlink_domain_nodes == 1 and pool.labels.items() <= node.labels.items() for pool in pools
    )
    return [[0] for _ in pools] if fits else None


def _solve_program(pools: Sequence[PoolConfig], nodes: Sequence[ClusterNode], device: str) -> list[list[int]] | None:
    """Solve the assignment as an integer program; the result is that of `_solve`.

    For each pool, x[n] is 1 if it uses slots of node n, and y[d] is its number of blocks of `nvlink_domain_nodes`
    nodes in NVLink domain d.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # imports much, and is needed with several nodes only
    from scipy.sparse import block_array, block_diag, csr_array, eye_array, hstack

    num_nodes, num_pools, domains = len(nodes), len(pools), list(_domain_order(nodes))
    capacity = np.array([node.slots(device) for node in nodes])
    in_domain = np.array([[node.domain == domain for node in nodes] for domain in domains], dtype=float)
    all_nodes, no_blocks = np.ones((1, num_nodes)), csr_array((num_nodes, len(domains)))
    pool_constraints, node_usage, upper_bounds, costs = [], [], [], []
    size_weight = 1 + num_pools * num_nodes * sum(pool.nodes for pool in pools)
    for p, pool in enumerate(pools):
        blocks = -pool.nvlink_domain_nodes * eye_array(len(domains))
        pool_constraints.append(block_array([[csr_array(all_nodes), None], [csr_array(in_domain), blocks]]))
        node_usage.append(hstack([pool.slots_per_node * eye_array(num_nodes), no_blocks]))
        fits = [size >= pool.slots_per_node for size in capacity]
        eligible = [fit and pool.labels.items() <= node.labels.items() for fit, node in zip(fits, nodes, strict=True)]
        upper_bounds += [np.array(eligible, dtype=float), np.full(len(domains), num_nodes)]
        costs += [size_weight * capacity + (num_pools - p) * np.arange(num_nodes), np.zeros(len(domains))]
    counts = np.concatenate([[pool.nodes, *[0] * len(domains)] for pool in pools])
    found = milp(
        np.concatenate(costs),
        integrality=np.ones(num_pools * (num_nodes + len(domains))),
        bounds=Bounds(0, np.concatenate(upper_bounds)),
        constraints=[
            LinearConstraint(block_diag(pool_constraints), counts, counts),
            LinearConstraint(hstack(node_usage), ub=capacity),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    chosen = found.x.reshape(num_pools, -1)[:, :num_nodes].round().astype(bool)
    return [[int(n) for n in np.flatnonzero(of_pool)] for of_pool in chosen]


def _domain_order(nodes: Sequence[ClusterNode]) -> dict[str, int]:
    order: dict[str, int] = {}
    for node in nodes:
        order.setdefault(node.domain, len(order))
    return order


def _shortage_message(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode], device: str) -> str:
    """Return an error message with the arithmetic, for the first pool that does not fit in addition to earlier ones."""
    num_before = next(n for n in range(len(pools)) if _solve(list(pools.values())[: n + 1], nodes, device) is None)
    (name, pool), before = list(pools.items())[num_before], list(pools)[:num_before]
    key, what = pool_key(name), "GPUs" if device == "cuda" else "CPU slots"
    labeled = [node for node in nodes if pool.labels.items() <= node.labels.items()]
    fitting = [node for node in labeled if node.slots(device) >= pool.slots_per_node]
    blocks = (
        ""
        if pool.nvlink_domain_nodes == 1
        else f", in blocks of nvlink_domain_nodes = {pool.nvlink_domain_nodes} within one NVLink domain"
    )
    labels = "".join(f", labeled {label}={value}" for label, value in pool.labels.items())
    has = " ".join(f"{node.hostname}:{node.slots(device)}" for node in labeled) or "none"
    return (
        f"{key}: needs nodes * slots_per_node = {pool.nodes} * {pool.slots_per_node} = {pool.slots} {what} on "
        f"{pool.nodes} node{'' if pool.nodes == 1 else 's'}{labels}{blocks}"
        + (f", in addition to {', '.join(pool_key(other) for other in before)}" if before else "")
        + f"; the cluster has {len(fitting)} node{'' if len(fitting) == 1 else 's'} with {pool.slots_per_node} {what} "
        f"or more ({has})"
    )
