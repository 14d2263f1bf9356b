"""Check that the weight sync of a run makes progress under NCCL's rules, by simulating the plans of all ranks.

The engine's layout is not traced, which takes SGLang several seconds, but taken to be that of a trainer of the engine's
size: both shard the same tensors along the same dimensions, and differ in padding and fused parameters.
`megarl reshard explain` simulates the traced layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    from megarl.reshard.layout.layout import WeightLayout

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

    stalls = find_stalls(_posted_groups(config, model))
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


def _posted_groups(config: RunConfig, model: ModelArchitecture) -> list[list[PostedGroup]]:
    """Return, by rank, the groups of messages that it posts in a sync."""
    from megarl.megatron.families.trainer_layouts import trainer_layouts

    grid = RankGrid.of(config.trainer.parallel, config.placement.slots)
    sources = trainer_layouts(model, grid, DTYPE, pipeline_split(config.trainer.parallel))
    engine = trainer_layouts(model, RankGrid(tp=config.rollout.tp), DTYPE)
    if config.disaggregated:
        return _posted_to_dedicated_engines(config, sources, engine)
    return _posted_to_colocated_engines(config, grid, sources, engine)


def _posted_to_colocated_engines(
    config: RunConfig, grid: RankGrid, sources: Sequence[WeightLayout], engine: Sequence[WeightLayout]
) -> list[list[PostedGroup]]:
    from megarl.reshard.analysis.nccl_progress import posted_groups
    from megarl.reshard.analysis.scenario import Scenario, arrange
    from megarl.reshard.layout.engine_ranks import resolve_strategy
    from megarl.reshard.layout.topology import Topology
    from megarl.reshard.planning.plan_cache import cached_plan

    tp, bucket_bytes = config.rollout.tp, config.weight_sync.bucket_bytes
    topology = Topology(tuple(slot // config.placement.slots_per_node for slot in range(grid.size)))
    scenario = Scenario(
        model=config.model.path,
        grid=grid,
        gen_pp=1,
        gen_tp=tp,
        sources=tuple(sources),
        engine=(tuple(engine),),
        topology=topology,
        bucket_bytes=bucket_bytes,
    )
    arrangement = arrange(resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp), scenario)
    served = [rank for rank, place in arrangement.places.items() if place.replica < config.rollout.replicas]
    needs = {rank: arrangement.needs[rank] for rank in served}
    members = {rank: sorted(group) for group in arrangement.groups for rank in group}
    return [
        posted_groups(
            cached_plan(sources, needs, topology, rank, bucket_bytes, groups=arrangement.groups).rounds,
            members.get(rank, ()),
        )
        for rank in range(grid.size)
    ]


def _posted_to_dedicated_engines(
    config: RunConfig, sources: Sequence[WeightLayout], engine: Sequence[WeightLayout]
) -> list[list[PostedGroup]]:
    from megarl.reshard.analysis.nccl_progress import posted_groups
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
    return [posted_groups(spec.plan(rank).rounds) for rank in range(spec.size)]
