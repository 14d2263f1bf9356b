"""Assigns nodes to pools: pure arithmetic, for an existing cluster and for a planned one.

The ranks of a pool fill one node after the other, and one NVLink domain after the other. Megatron's tensor-parallel
ranks are adjacent, so a tensor-parallel group shares a node; so do the ranks of an engine.

    nodes: 2, slots_per_node: 4, tp 2        node       a a a a  b b b b
                                             rank       0 1 2 3  4 5 6 7
                                             tp group   0 0 1 1  2 2 3 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.config.placement import PlacementConfig, PoolConfig, pool_key
from megarl.errors import ConfigError
from megarl.placement.nodes import ClusterNode


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
