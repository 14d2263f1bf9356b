"""Checks of the `trainer` options against a model: parallel sizes that must divide it, modules to recompute."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.families.pipeline_stages import PipelineSplit, stage_layers
from megarl.placement.rank_grid import RankGrid


def pipeline_split(parallel: ParallelConfig) -> PipelineSplit:
    """Return how `trainer.parallel` distributes layers over pipeline stages."""
    return PipelineSplit(num_chunks=parallel.vpp, first=parallel.first_stage_layers, last=parallel.last_stage_layers)


def parallel_problems(model: ModelArchitecture, parallel: ParallelConfig, slots: int) -> Iterator[str]:
    """Yield a message, starting with its YAML key, for each parallel size that does not fit `model` or `slots`."""
    p = parallel
    sizes = {"tp": p.tp, "ep": p.ep, "etp": p.expert_tp}
    for unit in model.sharding_units():
        size = sizes[unit.axis]
        # megatron-core allows several ranks to share a key-value head
        if unit.total % size and not (unit.can_replicate and size % unit.total == 0):
            key = "tp" if unit.axis == "etp" and p.etp is None else unit.axis
            rest = unit.total % size
            yield f"trainer.parallel.{key}: {unit.description} that do not divide, {unit.total} % {size} = {rest}"
    if p.ep > 1 and not model.num_experts:
        yield f"trainer.parallel.ep: {model.name} has no experts to distribute over ep = {p.ep} ranks"
    if model.num_experts and p.tp > 1 and not p.uses_sequence_parallel:
        yield f"trainer.parallel.sequence_parallel: models with experts need it if tp > 1, got tp = {p.tp} without"
    try:
        stage_layers(model.num_layers, p.pp, pipeline_split(p))
    except ConfigError as e:
        yield f"trainer.parallel.pp: {e}"
    try:
        RankGrid.of(p, slots)
    except ConfigError as e:
        yield f"placement: {e}"


def recompute_problems(model: ModelArchitecture, parallel: ParallelConfig, recompute: RecomputeConfig) -> Iterator[str]:
    """Yield a message, starting with its YAML key, for each `trainer.recompute` option that does not fit `model`."""
    match recompute.granularity:
        case "selective":
            available = recomputable_modules(model)
            for name in recompute.modules:
                if name not in available:
                    yield (
                        f"trainer.recompute.modules: no layer of {model.name} has {name}, needs one of "
                        f"{', '.join(available)}"
                    )
        case "full" if recompute.method == "uniform":
            try:
                stages = stage_layers(model.num_layers, parallel.pp, pipeline_split(parallel))
            except ConfigError:
                return  # `parallel_problems` reports it
            chunks = {len(chunk) for stage in stages for chunk in stage}
            for size in sorted(n for n in chunks if n % recompute.layers):
                rest = size % recompute.layers
                yield (
                    f"trainer.recompute.layers: needs to divide the layers of every model chunk, got {size} % "
                    f"{recompute.layers} = {rest}"
                )


def recomputable_modules(model: ModelArchitecture) -> list[str]:
    """Return the modules of `model` that `trainer.recompute.modules` may name."""
    experts = model.experts
    present = {
        "core_attn": True,
        "layernorm": True,
        "mla_up_proj": isinstance(model.attention, LatentAttention),
        "mlp": not all(model.has_routed_experts(i) for i in range(model.num_layers)),
        "moe": experts is not None,
        "moe_act": experts is not None,
        "shared_experts": experts is not None and experts.shared_ffn_size > 0,
    }
    return [name for name, is_present in present.items() if is_present]
