from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from megarl.config.section import Section
from megarl.config.trainer import ParallelConfig

MAIN_POOL = "main"
"""Name of the slots that the trainer and the engines share."""

Place = Literal["critic", "cost_critic", "reference", "reward_models", "teacher"]
"""Models that may live elsewhere than the trainer."""


class PoolConfig(Section):
    """Slots of one group of processes. A slot is one GPU, or one worker process on a machine without."""

    nodes: int = Field(default=1, ge=1)
    slots_per_node: int = Field(default=1, ge=1)

    labels: dict[str, str] = Field(default={})
    """Only nodes that Ray knows under these labels, such as `megarl.het-group: "1"`."""

    nvlink_domain_nodes: int = Field(default=1, ge=1)
    """Nodes that one NVLink domain joins, such as 18 in a GB200 NVL72: so many of the pool's nodes in a row are of one
    domain (Ray's label `megarl.nvlink-domain`), and tensor-parallel groups may span them."""

    @model_validator(mode="after")
    def _domains_divide(self) -> PoolConfig:
        if self.nodes % self.nvlink_domain_nodes:
            raise ValueError(
                f"nvlink_domain_nodes needs to divide nodes, got {self.nodes} % {self.nvlink_domain_nodes} = "
                f"{self.nodes % self.nvlink_domain_nodes}"
            )
        return self

    @property
    def slots(self) -> int:
        """All of them: nodes * slots_per_node."""
        return self.nodes * self.slots_per_node


class RolePlacement(Section):
    """Where a model lives."""

    pool: str = MAIN_POOL
    """`main`: in the trainer's processes. Else one of `placement.pools`."""


class PlacementConfig(PoolConfig):
    """What runs where: the trainer's slots, which all share that have no pool of their own, and further pools.

    colocated        {nodes: 2, slots_per_node: 8}
    disaggregated    the same, with pools: {b: {nodes: 4, slots_per_node: 8}}, rollout: {pool: b}
    mixed            colocated, with pools: {c: {slots_per_node: 8}}, critic: {pool: c}
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where the cluster has GPUs, else cpu."""

    pools: dict[str, PoolConfig] = Field(default={})
    """Name -> further slots, for what does not share the trainer's."""

    rollout: RolePlacement = RolePlacement()
    """The engines. In a pool of their own they receive weights over the network."""

    critic: RolePlacement = RolePlacement()
    cost_critic: RolePlacement = RolePlacement()

    reference: RolePlacement = RolePlacement()
    """What KL penalties, and PRIME's process rewards, measure from."""

    reward_models: RolePlacement = RolePlacement()
    """Those of `reward.terms`, and PRIME's."""

    teacher: RolePlacement = RolePlacement()

    swap_idle: bool | None = None
    """Models that share slots with the trainer wait in host memory while they have nothing to do. Default: on CUDA."""

    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long to wait for the cluster to grant the slots and for workers to start."""

    node_checks: bool | None = None
    """Before anything heavy starts, ask every node for its versions, paths, clock and memory, and have all of them
    reduce a number together. Default: where the cluster has several nodes."""

    node_check_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long a node may take to answer, and the reduction to arrive."""

    @model_validator(mode="after")
    def _pools_are_used(self) -> PlacementConfig:
        if MAIN_POOL in self.pools:
            raise ValueError(
                f"pools.{MAIN_POOL}: this is what nodes and slots_per_node describe, the slots of trainer and engines"
            )
        places = {"rollout": self.rollout} | self.places
        for place, role in places.items():
            if role.pool not in (MAIN_POOL, *self.pools):
                raise ValueError(f"{place}.pool needs one of {[MAIN_POOL, *sorted(self.pools)]}, got {role.pool!r}")
        unused = sorted(self.pools.keys() - {role.pool for role in places.values()})
        if unused:
            raise ValueError(
                f"pools.{unused[0]}: nothing lives there; give it to one of {', '.join(places)}, or leave it out"
            )
        return self

    @property
    def places(self) -> dict[str, RolePlacement]:
        """Where each kind of model lives, by `Place`."""
        return {place: getattr(self, place) for place in get_args(Place)}

    def sized(self, smallest_world: int) -> PlacementConfig:
        """As it is where it names nodes or slots, else with `smallest_world` slots on one node."""
        if self.model_fields_set & {"nodes", "slots_per_node"}:
            return self
        return self.model_copy(update={"slots_per_node": smallest_world})

    @property
    def all_pools(self) -> dict[str, PoolConfig]:
        """Every pool by name, `main` first."""
        return {MAIN_POOL: self, **self.pools}

    @property
    def all_slots(self) -> int:
        """Those of every pool."""
        return sum(pool.slots for pool in self.all_pools.values())


def pool_key(name: str) -> str:
    """Where the configuration describes the pool."""
    return "placement" if name == MAIN_POOL else f"placement.pools.{name}"


def require_layout(parallel: ParallelConfig, pool: PoolConfig, *, key: str, where: str) -> None:
    """Return if `parallel` divides the slots of `pool`.

    Args:
        key: where the configuration says how to split the model.
        where: and where it lives.

    Raises:
        ValueError: it does not, with the arithmetic.
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
            + ("; etp is tp where it is not given" if p.etp is None and p.tp > 1 else "")
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
