"""The section `placement`: which slots the trainer, engines and auxiliary models run on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megarl.config.section import Section
from megarl.config.trainer import ParallelConfig

MAIN_POOL = "main"
"""Name of the trainer's pool, which all models and engines without a pool of their own share."""

AUXILIARY_ROLES = ("critic", "cost_critic", "reference", "reward_models", "teacher")
"""Kinds of auxiliary models of megarl's algorithms: keys of `placement` with a pool for each."""


class PoolConfig(Section):
    """A pool of slots. A slot is one GPU, or one worker process on a node without GPUs."""

    nodes: int = Field(default=1, ge=1)
    """Number of nodes of the pool."""

    slots_per_node: int = Field(default=1, ge=1)
    """Number of slots on each of the pool's nodes."""

    labels: dict[str, str] = Field(default={})
    """Ray labels that the pool's nodes need, such as `megarl.het-group: "1"`. Default: any node."""

    nvlink_domain_nodes: int = Field(default=1, ge=1)
    """Number of nodes in one NVLink domain, such as 18 for a GB200 NVL72. That many consecutive nodes of the pool are
    taken from one domain (Ray's label `megarl.nvlink-domain`), and tensor-parallel groups may span them."""

    @model_validator(mode="after")
    def _check_nvlink_domain(self) -> PoolConfig:
        if self.nodes % self.nvlink_domain_nodes:
            raise ValueError(
                f"nvlink_domain_nodes needs to divide nodes, got {self.nodes} % {self.nvlink_domain_nodes} = "
                f"{self.nodes % self.nvlink_domain_nodes}"
            )
        return self

    @property
    def slots(self) -> int:
        """Number of slots of the pool: nodes * slots_per_node."""
        return self.nodes * self.slots_per_node


class RolePlacement(Section):
    """Where the engines or one kind of auxiliary model run."""

    pool: str = MAIN_POOL
    """`main`: on the trainer's slots. Otherwise the name of one of `placement.pools`."""


class PlacementConfig(PoolConfig):
    """Slots of the run: the trainer's pool, `main`, and further pools for engines and auxiliary models.

    colocated        {nodes: 2, slots_per_node: 8}
    disaggregated    the same, with pools: {b: {nodes: 4, slots_per_node: 8}}, rollout: {pool: b}
    mixed            colocated, with pools: {c: {slots_per_node: 8}}, critic: {pool: c}
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of all slots. `auto`: cuda if the cluster has enough GPUs for all slots, else cpu."""

    pools: dict[str, PoolConfig] = Field(default={})
    """Name -> further pool of slots, separate from the trainer's. Each needs to be used."""

    rollout: RolePlacement = RolePlacement()
    """Pool of the engines. In a pool of their own they receive weights over the network."""

    critic: RolePlacement = RolePlacement()
    """Pool of the critic."""

    cost_critic: RolePlacement = RolePlacement()
    """Pool of the cost critic of Safe RLHF."""

    reference: RolePlacement = RolePlacement()
    """Pool of the reference model, which KL penalties and PRIME's process rewards use."""

    reward_models: RolePlacement = RolePlacement()
    """Pool of the reward models of `reward.terms`, and of PRIME's."""

    teacher: RolePlacement = RolePlacement()
    """Pool of the teacher of distillation."""

    models: dict[str, RolePlacement] = Field(default={})
    """Name -> pool of a further model, of an algorithm outside the package. Default: `main`."""

    offload_idle_models: bool | None = None
    """Move models that share slots with the trainer to host memory while they are idle. Default: true on CUDA, false on
    CPU."""

    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Seconds to wait for the cluster to grant the slots, and for workers to start."""

    node_checks: bool | None = None
    """Check all nodes before workers start: package versions, paths, clocks, memory, and an all-reduce over the nodes.
    Default: true if the cluster has several nodes."""

    node_check_timeout_seconds: float = Field(default=60.0, gt=0)
    """Seconds that a node may take to answer, and that the all-reduce may take."""

    @model_validator(mode="after")
    def _check_pools(self) -> PlacementConfig:
        if MAIN_POOL in self.pools:
            raise ValueError(
                f"pools.{MAIN_POOL}: this name is reserved for the trainer's pool, which placement.nodes and "
                "placement.slots_per_node describe"
            )
        roles = {"rollout": self.rollout} | self.auxiliary_roles
        for role, placed in roles.items():
            if placed.pool not in (MAIN_POOL, *self.pools):
                raise ValueError(f"{role}.pool needs one of {[MAIN_POOL, *sorted(self.pools)]}, got {placed.pool!r}")
        unused = sorted(self.pools.keys() - {placed.pool for placed in roles.values()})
        if unused:
            raise ValueError(
                f"pools.{unused[0]}: the pool is not used; assign one of {', '.join(roles)} to it, or remove it"
            )
        return self

    @property
    def auxiliary_roles(self) -> dict[str, RolePlacement]:
        """Key below `placement` -> where the auxiliary models of this role run."""
        further = {f"models.{name}": placed for name, placed in self.models.items()}
        return {role: getattr(self, role) for role in AUXILIARY_ROLES} | further

    def pool_of(self, role: str) -> str:
        """Return the name of the pool of an auxiliary model, by its role."""
        placed = self.auxiliary_roles
        return placed.get(role, placed.get(f"models.{role}", RolePlacement())).pool

    def with_default_slots(self, min_world_size: int) -> PlacementConfig:
        """Return a copy with `min_world_size` slots on one node, or self where it names nodes or slots."""
        if self.model_fields_set & {"nodes", "slots_per_node"}:
            return self
        return self.model_copy(update={"slots_per_node": min_world_size})

    @property
    def all_pools(self) -> dict[str, PoolConfig]:
        """Name -> pool, of all pools; `main` comes first."""
        return {MAIN_POOL: self, **self.pools}

    @property
    def total_slots(self) -> int:
        """Number of slots of all pools together."""
        return sum(pool.slots for pool in self.all_pools.values())


def pool_key(name: str) -> str:
    """Return the YAML path of pool `name`."""
    return "placement" if name == MAIN_POOL else f"placement.pools.{name}"


def require_layout(parallel: ParallelConfig, pool: PoolConfig, *, key: str, where: str) -> None:
    """Check that the parallel sizes `parallel` fit the slots of `pool`.

    Args:
        key: YAML path of the parallel sizes, for the error message.
        where: YAML path of the pool, for the error message.

    Raises:
        ValueError: they do not; the message shows the arithmetic.
    """
    p, slots = parallel, pool.slots
    if slots % p.model_size:
        raise ValueError(
            f"{where} needs a number of slots that {key} tp * pp * cp divides, got nodes * slots_per_node = "
            f"{pool.nodes} * {pool.slots_per_node} = {slots}, tp * pp * cp = {p.tp} * {p.pp} * {p.cp} = "
            f"{p.model_size}, {slots} % {p.model_size} = {slots % p.model_size}"
        )
    stage, experts = slots // p.pp, p.expert_tp * p.ep
    if stage % experts:
        raise ValueError(
            f"{key} etp * ep needs to divide the ranks of a pipeline stage, got etp * ep = {p.expert_tp} * {p.ep} = "
            f"{experts}, slots / pp = {slots} / {p.pp} = {stage}, {stage} % {experts} = {stage % experts}"
            + ("; etp defaults to tp" if p.etp is None and p.tp > 1 else "")
        )
    near, joined = pool.slots_per_node * pool.nvlink_domain_nodes, pool.nvlink_domain_nodes
    if pool.nodes > joined and near % p.tp:
        raise ValueError(
            f"{key} tp needs to divide the slots of a node, so that no tensor-parallel group crosses nodes, got "
            f"{where} slots_per_node % tp = {near} % {p.tp} = {near % p.tp}"
            if joined == 1
            else f"{key} tp needs to divide the slots of an NVLink domain, so that no tensor-parallel group crosses "
            f"domains, got {where} slots_per_node * nvlink_domain_nodes % tp = {pool.slots_per_node} * {joined} % "
            f"{p.tp} = {near % p.tp}"
        )
