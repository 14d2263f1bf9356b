"""Weight layouts of all trainer ranks, computed from sizes alone: no model is built, so any scale can be planned.

The shards of a rank depend on its pipeline and tensor rank and, for routed experts, on its expert-parallel and expert
tensor rank. Each distinct layout is created once; ranks with the same shards share the layout object.

Layers are distributed over pipeline stages as in megatron-core:

8 layers, 2 stages                   stage 0: 0 1 2 3        stage 1: 4 5 6 7
the same, 2 model chunks per stage   stage 0: 0 1 | 4 5      stage 1: 2 3 | 6 7
7 layers, 3 stages, 2 in the last    not possible: 5 % 2 = 1
7 layers, 3 stages, 3 in the first   stage 0: 0 1 2          stage 1: 3 4      stage 2: 5 6
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import EMBEDDING, HEAD, ModelArchitecture, hf_tensors_of
from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.families.parameter_map import ParameterMap, local_shape, shard_pieces
from megarl.reshard.layout.layout import PieceTable, ShardPiece, WeightLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """Options of the distribution of layers over pipeline stages; the default is an even split."""

    num_chunks: int = 1
    """Number of model chunks per stage in the interleaved schedule (virtual pipeline size)."""
    first: int | None = None
    """Number of layers in the first stage (`num_layers_in_first_pipeline_stage`); None: as in the middle stages."""
    last: int | None = None
    """Number of layers in the last stage (`num_layers_in_last_pipeline_stage`); None: as in the middle stages."""


EVEN = PipelineSplit()


def stage_layers(num_layers: int, pp: int, split: PipelineSplit = EVEN) -> list[list[range]]:
    """Return the layer numbers of each model chunk, indexed [stage][chunk].

    Raises:
        ConfigError: the layers cannot be divided into stages and chunks of equal size.
    """
    counts = _layers_of_stages(num_layers, pp, split)
    if split.num_chunks > 1 and pp == 1:
        raise ConfigError(f"vpp needs pp > 1, got vpp {split.num_chunks} with pp 1")
    for stage, count in enumerate(counts):
        if count % split.num_chunks:
            raise ConfigError(
                f"vpp needs to divide the layers of every stage, got {count} % {split.num_chunks} = "
                f"{count % split.num_chunks} on stage {stage}"
            )
    stages: list[list[range]] = [[] for _ in range(pp)]
    at = 0
    for _ in range(split.num_chunks):
        for stage, count in enumerate(counts):
            here = count // split.num_chunks
            stages[stage].append(range(at, at + here))
            at += here
    return stages


def _layers_of_stages(num_layers: int, pp: int, split: PipelineSplit) -> list[int]:
    ends = [n for n in (split.first, split.last) if n is not None]
    if ends and pp == 1:
        raise ConfigError("first_stage_layers and last_stage_layers need pp > 1, got pp 1")
    if any(n < 1 for n in ends):
        raise ConfigError(f"a stage needs at least 1 layer, got {min(ends)}")
    left, between = num_layers - sum(ends), pp - len(ends)
    if not between:
        if left:
            raise ConfigError(f"the stages need to hold {num_layers} layers, got {' + '.join(map(str, ends))}")
        return ends
    if left < 0 or left % between:
        taken = "".join(f" - {n}" for n in ends)
        raise ConfigError(
            f"pp needs to divide the layers, got ({num_layers}{taken}) % {between} = {left % between}"
            if ends
            else f"pp needs to divide the layers, got {num_layers} % {pp} = {left % pp}"
        )
    counts = [left // between] * between
    return [*([] if split.first is None else [split.first]), *counts, *([] if split.last is None else [split.last])]


def pipeline_split(parallel: ParallelConfig) -> PipelineSplit:
    """Return how `trainer.parallel` distributes layers over pipeline stages."""
    return PipelineSplit(num_chunks=parallel.vpp, first=parallel.first_stage_layers, last=parallel.last_stage_layers)


def parallel_problems(model: ModelArchitecture, parallel: ParallelConfig, slots: int) -> Iterator[str]:
    """Yield a message, starting with its YAML key, for each parallel size that does not fit `model` or `slots`."""
    p = parallel
    sizes = {"tp": p.tp, "ep": p.ep, "etp": p.expert_tp, "tp * cp": p.tp * p.cp}
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
        "mla_up_proj": bool(model.attentions(LatentAttention)),
        "mlp": not all(layer.has_routed_experts for layer in model.layers),
        "moe": experts is not None,
        "moe_act": experts is not None,
        "shared_experts": experts is not None and experts.shared_ffn_size > 0,
    }
    return [name for name, is_present in present.items() if is_present]


VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this times tp, as in Megatron-LM."""

Maps = Mapping[str, ParameterMap]


def padded_vocab(model: ModelArchitecture, tp: int) -> int:
    """Return the number of embedding rows over all tensor-parallel ranks, padding included."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-model.vocab_size // multiple) * multiple


def trainer_layouts(
    model: ModelArchitecture, grid: RankGrid, dtype: str, split: PipelineSplit = EVEN
) -> list[WeightLayout]:
    """Return the layout of each rank; local names are megatron-core's with global layer and expert numbers.

    Raises:
        ConfigError: `grid` or `split` does not divide the layers or experts.
    """
    _require_experts(model, grid.ep)
    maps = model.parameter_maps()
    tensors = hf_tensors_of(maps.values(), dtype)
    padded = {EMBEDDING, HEAD} if model.head == "lm" else {EMBEDDING}
    rows = dict.fromkeys(padded, padded_vocab(model, grid.tp))
    everywhere: dict[tuple[int, int], PieceTable] = {}
    routed: dict[tuple[int, int, int], PieceTable] = {}
    for stage, names in enumerate(_stage_parameter_names(model, maps, grid.pp, split)):
        others, by_ep = _split_experts({name: maps[name] for name in names}, model.num_experts // grid.ep, grid.ep)
        for tp in range(grid.tp):
            pieces = _rank_pieces(others, tp, grid.tp, rows)
            everywhere[stage, tp] = PieceTable.pack(pieces).renumbered(tensors.names)
        for ep, experts in enumerate(by_ep):
            for etp in range(grid.expert_tp):
                pieces = _rank_pieces(experts, etp, grid.expert_tp, {})
                routed[stage, ep, etp] = PieceTable.pack(pieces).renumbered(tensors.names)
    layouts: dict[tuple[int, int, int, int], WeightLayout] = {}
    by_rank = []
    for rank in range(grid.size):
        at, expert = grid.coordinates(rank), grid.expert_coordinates(rank)
        key = (at.pp, at.tp, expert.ep, expert.etp)
        if key not in layouts:
            parts = everywhere[at.pp, at.tp], routed[at.pp, expert.ep, expert.etp]
            layouts[key] = WeightLayout(tensors, PieceTable.join(parts))
        by_rank.append(layouts[key])
    return by_rank


def _require_experts(model: ModelArchitecture, ep: int) -> None:
    if ep > 1 and (not model.num_experts or model.num_experts % ep):
        got = (
            f"{model.num_experts} % {ep} = {model.num_experts % ep}" if model.num_experts else f"ep {ep} and no experts"
        )
        raise ConfigError(f"ep needs to divide the experts of {model.name}, got {got}")


def _split_experts(maps: Maps, per_rank: int, ep: int) -> tuple[Maps, list[Maps]]:
    """Return the parameters outside the experts, and the experts' parameters by expert-parallel rank."""
    others = {name: mapping for name, mapping in maps.items() if mapping.expert is None}
    experts_by_ep: list[dict[str, ParameterMap]] = [{} for _ in range(ep)]
    for name, mapping in maps.items():
        if mapping.expert is not None:
            experts_by_ep[mapping.expert // per_rank][name] = mapping
    return others, list(experts_by_ep)


def _rank_pieces(maps: Maps, rank: int, size: int, rows: Mapping[str, int]) -> Iterator[ShardPiece]:
    """Yield the pieces of tensor rank `rank` of `size`; `rows`: padded row count over all ranks, by parameter."""
    for name, mapping in maps.items():
        shape = local_shape(mapping, size, rows=rows.get(name))
        yield from shard_pieces(name, mapping, shape, rank=rank, size=size)


def _stage_parameter_names(model: ModelArchitecture, maps: Maps, pp: int, split: PipelineSplit) -> Sequence[list[str]]:
    """Return the parameter names of each pipeline stage."""
    stage_of = {
        str(layer): stage
        for stage, chunks in enumerate(stage_layers(model.num_layers, pp, split))
        for layers in chunks
        for layer in layers
    }
    names: list[list[str]] = [[] for _ in range(pp)]
    for name in maps:
        match name.split(".", 3):
            case ["embedding", *_]:
                names[0].append(name)
            case ["decoder", "layers", number, _]:
                names[stage_of[number]].append(name)
            case ["output_layer", *_] if model.tie_embeddings and pp == 1:
                pass  # the same parameter as the embedding
            case _:
                names[-1].append(name)
    return names
