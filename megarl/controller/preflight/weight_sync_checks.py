"""Check that the weight sync of a run makes progress under NCCL's rules, and time it, from the plans of all ranks.

The engine's layout is not traced, which takes SGLang several seconds, but taken to be that of a trainer of the engine's
size: both shard the same tensors along the same dimensions, and differ in padding and fused parameters.
`megarl reshard explain` simulates the traced layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.run import RunConfig, StageConfig
from megarl.controller.preflight.model_checks import will_write_model
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture_from_folder
from megarl.megatron.families.trainer_layouts import pipeline_split

if TYPE_CHECKING:
    from megarl.reshard.analysis.nccl_progress import PostedGroup
    from megarl.reshard.analysis.sync_clock import SyncTiming
    from megarl.reshard.layout.layout import WeightLayout
    from megarl.reshard.layout.topology import LinkRates, Topology

MAX_TENSORS = 20_000
"""Limit on the tensors of the model times the ranks, above which planning every rank takes more than seconds."""
DTYPE = "bfloat16"
"""Of the planned tensors: it does not change which rank sends to which."""


def find_stall_problems(config: RunConfig, device: str | None) -> Iterator[str]:
    """Find ranks that would wait for each other forever; the configuration needs to have passed the other checks.

    Yields nothing if the plan is not simulated, see `why_not_simulated`.

    Args:
        device: device of the ranks; None: unknown, taken to be `cuda`.
    """
    model = _model(config)
    if device == "cpu" or why_not_simulated(config, model) is not None:
        return
    # imports torch, which most checks do without
    from megarl.reshard.analysis.nccl_progress import find_stalls

    stalls = find_stalls(_case(config, model).posted_groups())
    if stalls:
        others = f", and {len(stalls) - 1} others wait too" if len(stalls) > 1 else ""
        yield f"weight_sync: the first sync would hang over NCCL: {stalls[0]} forever{others}"


def find_delta_problems(config: RunConfig, device: str | None) -> Iterator[str]:
    """Find engines that lose their weights before every sync, so that `weight_sync.delta` would save nothing.

    Args:
        device: as for `find_stall_problems`.
    """
    if config.weight_sync.delta and config.releases_engine_memory(device or "cuda"):
        yield (
            "weight_sync.delta needs engines that keep their weights while the trainer works: set "
            "rollout.engine.release_memory: false, or give the engines a pool of their own (placement.rollout.pool)"
        )


def find_weight_sync_notices(config: StageConfig, device: str | None) -> list[str]:
    """Return a message if the plan of a run on GPUs was not simulated; the configuration needs to be valid."""
    if device == "cpu" or not isinstance(config, RunConfig) or will_write_model(config):
        return []
    reason = why_not_simulated(config, _model(config))
    return [f"weight_sync: not simulated under NCCL's rules: {reason}"] if reason else []


def describe_sync_time(config: StageConfig, device: str | None) -> list[str]:
    """Return a line with the simulated time of a weight sync over several nodes; none if it is not simulated.

    Args:
        device: as for `find_stall_problems`.
    """
    if device == "cpu" or not isinstance(config, RunConfig) or will_write_model(config):
        return []
    model = _model(config)
    if (config.placement.nodes == 1 and not config.disaggregated) or why_not_simulated(config, model) is not None:
        return []
    from megarl.reshard.layout.topology import LinkRates

    rates = LinkRates()
    timing, bound = _case(config, model).time(rates)
    share = "" if timing.nic_share is None else f", NIC share {timing.nic_share:.2f}"
    factor = f" ({timing.seconds_planned / bound:.2f}x)" if bound else ""
    return [
        f"weight_sync: {timing.seconds_planned * 1e3:,.1f} ms planned, at least {bound * 1e3:,.1f} ms with any method"
        f"{factor}, at {rates.network / 1e9:g} GB/s per NIC, one for each rank, and {rates.nvlink / 1e9:g} GB/s of "
        f"NVLink; busiest NIC {timing.busiest_nic_bytes / 1e6:,.1f} MB{share}, at most {timing.groups} groups and "
        f"{timing.p2p_calls} p2p calls per rank; `megarl reshard explain` takes other rates"
    ]


def why_not_simulated(config: RunConfig, model: ModelArchitecture) -> str | None:
    """Return why the plan of the weight sync is not simulated; None if it is."""
    tp, ranks, explain = config.rollout.tp, config.placement.slots, "`megarl reshard explain` simulates it"
    ranks += tp * config.rollout.replicas if config.disaggregated else 0
    if config.weight_sync.strategy == "gather_hf":
        return "gather_hf calls its collectives in the same order on every rank of a replica"
    if config.rollout.engine.layout_options:
        return f"only the traced layout shows what options of rollout.engine.extra_args change; {explain}"
    if any(unit.total % tp for unit in model.sharding_units() if unit.axis != "ep"):
        return f"with rollout.tp = {tp}, SGLang replicates heads, which only its traced layout shows; {explain}"
    tensors = len(model.tensors(DTYPE))
    if tensors * ranks > MAX_TENSORS:
        return f"planning {tensors:,} tensors for {ranks:,} ranks takes too long here; {explain}"
    return None


def _model(config: RunConfig) -> ModelArchitecture:
    return load_architecture_from_folder(Path(config.model.path), family=config.model.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SyncCase:
    """Inputs of the plans of all ranks."""

    sources: Sequence[WeightLayout]
    needs: Mapping[int, WeightLayout]
    topology: Topology
    groups: Sequence[Sequence[int]] = ()
    bucket_bytes: int

    def posted_groups(self) -> list[list[PostedGroup]]:
        """Return, by rank, the groups of messages that it posts in a sync."""
        from megarl.reshard.analysis.nccl_progress import posted_groups
        from megarl.reshard.planning.plan_cache import cached_plan

        members = {rank: sorted(group) for group in self.groups for rank in group}
        return [
            posted_groups(
                cached_plan(
                    self.sources, self.needs, self.topology, rank, self.bucket_bytes, groups=self.groups
                ).rounds,
                members.get(rank, ()),
            )
            for rank in range(len(self.sources))
        ]

    def time(self, rates: LinkRates) -> tuple[SyncTiming, float]:
        """Return the simulated time of a sync, and the least seconds of any method."""
        from megarl.reshard.analysis.sync_clock import box_schedule, time_schedule
        from megarl.reshard.layout.lower_bounds import seconds_bound
        from megarl.reshard.planning.plan import plan_rank
        from megarl.reshard.planning.plan_cache import cached_index

        index = cached_index(self.sources, self.needs, self.topology, self.bucket_bytes, groups=self.groups)
        schedule = box_schedule((plan_rank(index, rank) for rank in range(len(self.sources))), index.large_bytes)
        bound = seconds_bound(self.sources, self.needs, self.topology, rates)
        return time_schedule(schedule, self.topology, rates), bound


def _case(config: RunConfig, model: ModelArchitecture) -> _SyncCase:
    """Return what the ranks of a run plan from."""
    from megarl.megatron.families.trainer_layouts import trainer_layouts

    grid = RankGrid.of(config.trainer.parallel, config.placement.slots)
    sources = trainer_layouts(model, grid, DTYPE, pipeline_split(config.trainer.parallel))
    engine = trainer_layouts(model, RankGrid(tp=config.rollout.tp), DTYPE)
    if config.disaggregated:
        return _disaggregated_case(config, sources, engine)
    return _colocated_case(config, grid, sources, engine)


def _colocated_case(
    config: RunConfig, grid: RankGrid, sources: Sequence[WeightLayout], engine: Sequence[WeightLayout]
) -> _SyncCase:
    from megarl.reshard.analysis.scenario import Scenario, arrange
    from megarl.reshard.layout.engine_ranks import needs_by_rank, resolve_strategy
    from megarl.reshard.layout.topology import Topology

    tp = config.rollout.tp
    topology = Topology(tuple(slot // config.placement.slots_per_node for slot in range(grid.size)))
    scenario = Scenario(
        model=config.model.path,
        grid=grid,
        gen_tp=tp,
        sources=tuple(sources),
        engine=tuple(engine),
        topology=topology,
        bucket_bytes=config.weight_sync.bucket_bytes,
    )
    arrangement = arrange(resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp), scenario)
    return _SyncCase(
        sources=sources,
        needs=needs_by_rank(arrangement.placements[: config.rollout.replicas], engine),
        topology=topology,
        groups=arrangement.groups,
        bucket_bytes=scenario.bucket_bytes,
    )


def _disaggregated_case(
    config: RunConfig, sources: Sequence[WeightLayout], engine: Sequence[WeightLayout]
) -> _SyncCase:
    from megarl.reshard.layout.topology import Topology
    from megarl.reshard.planning.disaggregated import TransferSpec

    placement, tp, per_node = config.placement, config.rollout.tp, config.rollout_pool.slots_per_node
    used_per_node = per_node if tp > per_node else per_node - per_node % tp
    spec = TransferSpec(
        sources=sources,
        needs=engine,
        num_engines=config.rollout.replicas,
        nodes=(
            *(slot // placement.slots_per_node for slot in range(placement.slots)),
            *(placement.nodes + rank // used_per_node for rank in range(tp * config.rollout.replicas)),
        ),
        bucket_bytes=config.weight_sync.bucket_bytes,
    )
    held, needs = spec.layouts()
    return _SyncCase(sources=held, needs=needs, topology=Topology(spec.nodes), bucket_bytes=spec.bucket_bytes)
