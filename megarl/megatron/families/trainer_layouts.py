"""Every trainer rank's layout from sizes alone: no model is built, so any scale can be planned.

What a rank holds depends on its stage, its tensor rank and, of the routed experts, its expert-parallel and its expert
tensor rank. Each such share is made once, and ranks that hold the same have the same layout object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megarl.errors import ConfigError
from megarl.megatron.families.architecture import EMBEDDING, HEAD, Decoder, tensors_of
from megarl.megatron.families.parameter_map import ParameterMap, local_shape, pieces
from megarl.megatron.families.pipeline_stages import EVEN, PipelineSplit, stage_layers
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import Piece, WeightLayout

VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this times tp, as Megatron-LM does."""

Maps = Mapping[str, ParameterMap]


def padded_vocab(model: Decoder, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-model.vocab_size // multiple) * multiple


def trainer_layouts(model: Decoder, grid: RankGrid, dtype: str, split: PipelineSplit = EVEN) -> list[WeightLayout]:
    """By rank, what megatron-core holds of `model`; local names number layers and experts globally.

    Raises:
        ConfigError: layers or experts do not divide.
    """
    _require_experts(model, grid.ep)
    maps = model.maps()
    tensors = tensors_of(maps.values(), dtype)
    padded = {EMBEDDING, HEAD} if model.head == "lm" else {EMBEDDING}
    rows = dict.fromkeys(padded, padded_vocab(model, grid.tp))
    everywhere: dict[tuple[int, int], tuple[Piece, ...]] = {}
    routed: dict[tuple[int, int, int], tuple[Piece, ...]] = {}
    for stage, names in enumerate(_names_of_stages(model, maps, grid.pp, split)):
        others, by_ep = _deal_experts({name: maps[name] for name in names}, model.num_experts // grid.ep, grid.ep)
        for tp in range(grid.tp):
            everywhere[stage, tp] = tuple(_pieces(others, tp, grid.tp, rows))
        for ep, experts in enumerate(by_ep):
            for etp in range(grid.expert_tp):
                routed[stage, ep, etp] = tuple(_pieces(experts, etp, grid.expert_tp, {}))
    layouts: dict[tuple[int, int, int, int], WeightLayout] = {}
    by_rank = []
    for rank in range(grid.size):
        at, expert = grid.coordinates(rank), grid.expert_coordinates(rank)
        key = (at.pp, at.tp, expert.ep, expert.etp)
        if key not in layouts:
            layouts[key] = WeightLayout(tensors, everywhere[at.pp, at.tp] + routed[at.pp, expert.ep, expert.etp])
        by_rank.append(layouts[key])
    return by_rank


def _require_experts(model: Decoder, ep: int) -> None:
    if ep > 1 and (not model.num_experts or model.num_experts % ep):
        got = (
            f"{model.num_experts} % {ep} = {model.num_experts % ep}" if model.num_experts else f"ep {ep} and no experts"
        )
        raise ConfigError(f"ep needs to divide the experts of {model.architecture}, got {got}")


def _deal_experts(maps: Maps, per_rank: int, ep: int) -> tuple[Maps, list[Maps]]:
    """What all expert-parallel ranks hold, and by expert-parallel rank its experts."""
    others = {name: mapping for name, mapping in maps.items() if mapping.expert is None}
    dealt: list[dict[str, ParameterMap]] = [{} for _ in range(ep)]
    for name, mapping in maps.items():
        if mapping.expert is not None:
            dealt[mapping.expert // per_rank][name] = mapping
    return others, list(dealt)


def _pieces(maps: Maps, rank: int, size: int, rows: Mapping[str, int]) -> Iterator[Piece]:
    """`rows`: over all ranks, of parameters that padding makes longer than their tensors."""
    for name, mapping in maps.items():
        shape = local_shape(mapping, size, rows=rows.get(name))
        yield from pieces(name, mapping, shape, rank=rank, size=size)


def _names_of_stages(model: Decoder, maps: Maps, pp: int, split: PipelineSplit) -> Sequence[list[str]]:
    """[stage] -> its parameters."""
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
                pass  # it is the embedding
            case _:
                names[-1].append(name)
    return names
