"""Whether a model fits what is asked for under `trainer`: sizes that would have to divide it, parts that it lacks."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.families.pipeline_stages import PipelineSplit, stage_layers
from megarl.placement.rank_grid import RankGrid


def pipeline_split(parallel: ParallelConfig) -> PipelineSplit:
    """How layers are dealt to stages."""
    return PipelineSplit(chunks=parallel.vpp, first=parallel.first_stage_layers, last=parallel.last_stage_layers)


def parallel_problems(model: Decoder, parallel: ParallelConfig, slots: int) -> Iterator[str]:
    """A sentence, beginning with its key, for each size under `trainer.parallel` that `model` or `slots` do not fit."""
    p = parallel
    sizes = {"tp": p.tp, "ep": p.ep, "etp": p.expert_tp}
    for units in model.units():
        size = sizes[units.axis]
        # megatron-core lets several ranks share a key-value head
        if units.total % size and not (units.repeats and size % units.total == 0):
            key = "tp" if units.axis == "etp" and p.etp is None else units.axis
            rest = units.total % size
            yield f"trainer.parallel.{key}: {units.what} that do not divide, {units.total} % {size} = {rest}"
    if p.ep > 1 and not model.num_experts:
        yield f"trainer.parallel.ep: {model.architecture} has no experts to deal to ep = {p.ep} ranks"
    if model.num_experts and p.tp > 1 and not p.uses_sequence_parallel:
        yield f"trainer.parallel.sequence_parallel: experts need it where tp > 1, got tp = {p.tp} without"
    try:
        stage_layers(model.num_layers, p.pp, pipeline_split(p))
    except ConfigError as e:
        yield f"trainer.parallel.pp: {e}"
    try:
        RankGrid.of(p, slots)
    except ConfigError as e:
        yield f"placement: {e}"


def recompute_problems(model: Decoder, parallel: ParallelConfig, recompute: RecomputeConfig) -> Iterator[str]:
    """A sentence, beginning with its key, for what `trainer.recompute` names and `model` has not."""
    match recompute.granularity:
        case "selective":
            there = recomputable(model)
            for name in recompute.modules:
                if name not in there:
                    yield (
                        f"trainer.recompute.modules: no layer of {model.architecture} has {name}, needs one of "
                        f"{', '.join(there)}"
                    )
        case "full":
            try:
                stages = stage_layers(model.num_layers, parallel.pp, pipeline_split(parallel))
            except ConfigError:
                return  # a problem of trainer.parallel
            chunks = {len(chunk) for stage in stages for chunk in stage}
            for size in sorted(n for n in chunks if n % recompute.layers):
                rest = size % recompute.layers
                yield (
                    f"trainer.recompute.layers: needs to divide the layers of every model chunk, got {size} % "
                    f"{recompute.layers} = {rest}"
                )


def recomputable(model: Decoder) -> list[str]:
    """What `trainer.recompute.modules` may name."""
    experts = model.experts
    present = {
        "core_attn": True,
        "mla_up_proj": isinstance(model.attention, LatentAttention),
        "mlp": not all(model.is_routed(i) for i in range(model.num_layers)),
        "moe": experts is not None,
        "shared_experts": experts is not None and experts.shared_ffn_size > 0,
    }
    return [name for name, is_there in present.items() if is_there]
