"""Which machines give a pool its slots: pure arithmetic, for a cluster that is there and for one to be asked for alike.

Ranks of a pool fill a machine before the next one begins, and NVLink domains likewise. Megatron's tensor-parallel ranks
are neighbours, so that a group of them shares a machine; so do the ranks of an engine.

    nodes: 2, slots_per_node: 4, tp 2        machine    a a a a  b b b b
                                             rank       0 1 2 3  4 5 6 7
                                             tp group   0 0 1 1  2 2 3 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, block_diag, csr_array, eye_array, hstack

from megarl.config.placement import PlacementConfig, PoolConfig, pool_key
from megarl.errors import ConfigError
from megarl.placement.nodes import ClusterNode


def resolve_device(config: PlacementConfig, nodes: Sequence[ClusterNode]) -> str:
    """`cpu` or `cuda`, from the configuration and what the cluster reports.

    Raises:
        ConfigError: cuda was asked for, and the cluster has too few GPUs.
    """
    gpus = sum(node.gpus for node in nodes)
    if config.device == "cuda" and gpus < config.all_slots:
        raise ConfigError(f"placement.device: cuda needs {config.all_slots} GPUs in the cluster, got {gpus}")
    if config.device == "auto":
        return "cuda" if gpus >= config.all_slots else "cpu"
    return config.device


def assign_nodes(
    pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode], device: str
) -> dict[str, list[ClusterNode]]:
    """By pool, the machines of its ranks: `pool.nodes` of them, each for `slots_per_node` ranks in a row.

    Of all choices that give every pool what it needs, one with the smallest machines, and of equal machines the
    earlier, the first pool before others. Pools may share machines.

    Args:
        nodes: in the order in which ranks should fill them.

    Raises:
        ConfigError: there are too few machines for a pool, with the arithmetic.
    """
    chosen = _choose(list(pools.values()), nodes, device)
    if chosen is None:
        raise ConfigError(_too_few(pools, nodes, device))
    order = _domain_order(nodes)
    found = {}
    for name, of_pool in zip(pools, chosen, strict=True):
        places = sorted(of_pool, key=lambda i: (order[nodes[i].domain], i))
        found[name] = [nodes[i] for i in places]
    return found


def _choose(pools: Sequence[PoolConfig], nodes: Sequence[ClusterNode], device: str) -> list[list[int]] | None:
    """By pool, places in `nodes`; None: there is no choice.

    An integer program: for each pool, x[n] is 1 where it has part of machine n, and y[d] is its number of rows of
    `nvlink_domain_nodes` machines in domain d.
    """
    num_nodes, num_pools, domains = len(nodes), len(pools), list(_domain_order(nodes))
    capacity = np.array([node.slots(device) for node in nodes])
    in_domain = np.array([[node.domain == domain for node in nodes] for domain in domains], dtype=float)
    every, none = np.ones((1, num_nodes)), csr_array((num_nodes, len(domains)))
    of_pools, uses, most, costs = [], [], [], []
    heavier = 1 + num_pools * num_nodes * sum(pool.nodes for pool in pools)
    for p, pool in enumerate(pools):
        rows = -pool.nvlink_domain_nodes * eye_array(len(domains))
        of_pools.append(block_array([[csr_array(every), None], [csr_array(in_domain), rows]]))
        uses.append(hstack([pool.slots_per_node * eye_array(num_nodes), none]))
        fits = [size >= pool.slots_per_node for size in capacity]
        may = [fit and pool.labels.items() <= node.labels.items() for fit, node in zip(fits, nodes, strict=True)]
        most += [np.array(may, dtype=float), np.full(len(domains), num_nodes)]
        costs += [heavier * capacity + (num_pools - p) * np.arange(num_nodes), np.zeros(len(domains))]
    counts = np.concatenate([[pool.nodes, *[0] * len(domains)] for pool in pools])
    found = milp(
        np.concatenate(costs),
        integrality=np.ones(num_pools * (num_nodes + len(domains))),
        bounds=Bounds(0, np.concatenate(most)),
        constraints=[
            LinearConstraint(block_diag(of_pools), counts, counts),
            LinearConstraint(hstack(uses), ub=capacity),
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


def _too_few(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode], device: str) -> str:
    """Of the first pool that finds no place beside those before it, the arithmetic."""
    num_before = next(n for n in range(len(pools)) if _choose(list(pools.values())[: n + 1], nodes, device) is None)
    (name, pool), before = list(pools.items())[num_before], list(pools)[:num_before]
    key, what = pool_key(name), "GPUs" if device == "cuda" else "CPU slots"
    labelled = [node for node in nodes if pool.labels.items() <= node.labels.items()]
    fitting = [node for node in labelled if node.slots(device) >= pool.slots_per_node]
    rows = (
        ""
        if pool.nvlink_domain_nodes == 1
        else f", in rows of nvlink_domain_nodes = {pool.nvlink_domain_nodes} that one NVLink domain joins"
    )
    labels = "".join(f", labelled {label}={value}" for label, value in pool.labels.items())
    has = " ".join(f"{node.hostname}:{node.slots(device)}" for node in labelled) or "none"
    return (
        f"{key}: needs nodes * slots_per_node = {pool.nodes} * {pool.slots_per_node} = {pool.slots} {what} on "
        f"{pool.nodes} node{'' if pool.nodes == 1 else 's'}{labels}{rows}"
        + (f", beside {', '.join(pool_key(other) for other in before)}" if before else "")
        + f"; the cluster has {len(fitting)} node{'' if len(fitting) == 1 else 's'} with {pool.slots_per_node} {what} "
        f"or more ({has})"
    )
