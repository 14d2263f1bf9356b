"""Every trainer rank's layout from sizes alone: no model is built, so any scale can be planned."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import ConfigError
from megarl.megatron.families.dense import DenseModel
from megarl.megatron.families.mapping import ParameterMap, pieces
from megarl.placement.grid import RankGrid
from megarl.reshard.layout import Piece, WeightLayout

VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this times tp, as Megatron-LM does."""


def padded_vocab(model: DenseModel, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-model.vocab_size // multiple) * multiple


def trainer_layouts(model: DenseModel, grid: RankGrid, dtype: str) -> list[WeightLayout]:
    """By rank, what megatron-core holds of `model` when its layers are split evenly over the pipeline stages.

    Raises:
        ConfigError: the layers do not divide.
    """
    if model.num_layers % grid.pp:
        raise ConfigError(
            f"pp needs to divide the layers, got {model.num_layers} % {grid.pp} = {model.num_layers % grid.pp}"
        )
    tensors = model.tensors(dtype)
    by_shard = {
        (pp, tp): WeightLayout(tensors, tuple(_stage_pieces(model, grid, pp, tp)))
        for pp in range(grid.pp)
        for tp in range(grid.tp)
    }
    at = [grid.coordinates(rank) for rank in range(grid.size)]
    return [by_shard[c.pp, c.tp] for c in at]


def _stage_pieces(model: DenseModel, grid: RankGrid, pp: int, tp: int) -> Iterator[Piece]:
    per_stage = model.num_layers // grid.pp
    for name in model.parameter_names():
        if _on_stage(name, pp, grid.pp, per_stage, model.tie_embeddings):
            mapping = model.parameter_map(name)
            yield from pieces(name, mapping, _local_shape(name, mapping, model, grid.tp), rank=tp, size=grid.tp)


def _on_stage(name: str, pp: int, stages: int, per_stage: int, tied: bool) -> bool:
    match name.split("."):
        case ["embedding", *_]:
            return pp == 0
        case ["decoder", "layers", number, *_]:
            return int(number) // per_stage == pp
        case ["output_layer", *_]:
            # tied and on the embedding's stage, it is the embedding
            return pp == stages - 1 and not (tied and stages == 1)
        case _:
            return pp == stages - 1


def _local_shape(name: str, mapping: ParameterMap, model: DenseModel, tp: int) -> tuple[int, ...]:
    first = mapping.parts[0][0]
    rows = sum(r.stop - r.start for part in mapping.parts for r in part)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows = padded_vocab(model, tp)
    shape = [rows, *first.shape[1:]]
    if mapping.shard_dim is not None:
        shape[mapping.shard_dim] //= tp
    return tuple(shape)
