"""Weight layouts of all trainer ranks, computed from sizes alone: no model is built, so any scale can be planned.

The shards of a rank depend on its pipeline and tensor rank and, for routed experts, on its expert-parallel and expert
tensor rank. Each distinct layout is created once; ranks with the same shards share the layout object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megarl.errors import ConfigError
from megarl.megatron.families.architecture import EMBEDDING, HEAD, ModelArchitecture, hf_tensors_of
from megarl.megatron.families.parameter_map import ParameterMap, local_shape, shard_pieces
from megarl.megatron.families.pipeline_stages import EVEN, PipelineSplit, stage_layers
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import PieceTable, ShardPiece, WeightLayout

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
