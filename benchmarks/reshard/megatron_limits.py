"""Limits of megatron-core's resharding, checked before any of it is imported."""

from __future__ import annotations

import math

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.feed_forward import GatedMlp
from megarl.megatron.families.trainer_layouts import padded_vocab
from megarl.reshard.analysis.scenario import Scenario


def megatron_grids(scenario: Scenario) -> tuple[RankGrid, RankGrid]:
    """Return the training and generation grids; context-parallel ranks count as data-parallel ranks.

    Raises:
        ConfigError: some ranks would be in no engine.
    """
    grid, engine = scenario.grid, scenario.gen_tp
    if grid.size % engine:
        raise ConfigError(
            f"megatron_core needs every rank in an engine, got {grid.size} ranks % gen tp {engine} = "
            f"{grid.size % engine}"
        )
    train = RankGrid(tp=grid.tp, dp=grid.dp * grid.cp, pp=grid.pp)
    return train, RankGrid(tp=engine, dp=grid.size // engine)


def require_megatron_core_support(model: ModelArchitecture, train: RankGrid, gen: RankGrid) -> None:
    """Check that Megatron can build both models and that its planner can split the parameters into tiles.

    Raises:
        ConfigError: it cannot; names the limit.
    """
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    is_dense = all(isinstance(layer.mlp, GatedMlp) for layer in model.layers)
    if not is_dense or not isinstance(mlp, GatedMlp) or not isinstance(attention, GroupedQueryAttention):
        raise ConfigError(f"megatron_core is compared on dense models only, got {model.name}")
    if model.tie_embeddings and train.pp > 1:
        raise ConfigError(
            "megatron_core does not support tied embeddings with pipeline stages, which name the head differently"
        )
    if attention.num_kv_heads % gen.tp:
        raise ConfigError(
            f"megatron_core needs gen tp to divide the key-value heads of a Megatron model, got "
            f"{attention.num_kv_heads} % {gen.tp} = {attention.num_kv_heads % gen.tp}"
        )
    padded = padded_vocab(model, train.tp), padded_vocab(model, gen.tp)
    if padded[0] != padded[1]:
        raise ConfigError(
            f"megatron_core needs the same padded vocabulary on both sides, got {padded[0]} and {padded[1]}"
        )
    qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    lengths = {
        "embedding": (padded[0], 1),
        "linear_qkv": (qkv, 1),
        "linear_proj": (attention.num_heads * attention.head_dim, 1),
        "linear_fc1": (2 * mlp.ffn_size, 2),  # gate and up are split separately
        "linear_fc2": (mlp.ffn_size, 1),
    }
    for name, (length, stride) in lengths.items():
        tiles = math.lcm(train.tp * stride, gen.tp * stride)
        if length % tiles:
            raise ConfigError(f"megatron_core needs {name} to be split into {tiles} tiles, got {length} % {tiles}")
