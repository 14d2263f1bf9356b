"""What megatron-core's resharding does not serve, said before any of it is imported."""

from __future__ import annotations

import math

from megarl.errors import ConfigError
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.trainer_layouts import padded_vocab
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import Scenario


def megatron_grids(scenario: Scenario) -> tuple[RankGrid, RankGrid]:
    """Of both sides; context parallel ranks hold the same weights, as data parallel ones do.

    Raises:
        ConfigError: ranks would be left without an engine.
    """
    grid, engine = scenario.grid, scenario.gen_pp * scenario.gen_tp
    if grid.size % engine:
        raise ConfigError(
            f"megatron_core needs every rank in an engine, got {grid.size} ranks % (gen pp {scenario.gen_pp} * tp "
            f"{scenario.gen_tp}) = {grid.size % engine}"
        )
    train = RankGrid(tp=grid.tp, dp=grid.dp * grid.cp, pp=grid.pp)
    return train, RankGrid(tp=scenario.gen_tp, dp=grid.size // engine, pp=scenario.gen_pp)


def require_served(model: Decoder, train: RankGrid, gen: RankGrid) -> None:
    """Return where Megatron can build both sides and its planner can cut the parameters into tiles.

    Raises:
        ConfigError: they do not divide.
    """
    attention, ffn_size = model.attention, model.mlp.ffn_size
    if model.experts or not isinstance(attention, GroupedQueryAttention):
        raise ConfigError(f"megatron_core is compared on dense models only, got {model.architecture}")
    if model.tie_embeddings and (train.pp > 1 or gen.pp > 1):
        raise ConfigError("megatron_core does not know a tied head, which pipeline stages hold under another name")
    if attention.num_kv_heads % gen.tp:
        raise ConfigError(
            f"megatron_core needs gen tp to divide the key-value heads of a Megatron model, got "
            f"{attention.num_kv_heads} % {gen.tp} = {attention.num_kv_heads % gen.tp}"
        )
    padded = padded_vocab(model, train.tp), padded_vocab(model, gen.tp)
    if padded[0] != padded[1]:
        raise ConfigError(
            f"megatron_core needs the vocabulary padded alike on both sides, got {padded[0]} and {padded[1]}"
        )
    qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    lengths = {
        "embedding": (padded[0], 1),
        "linear_qkv": (qkv, 1),
        "linear_proj": (attention.num_heads * attention.head_dim, 1),
        "linear_fc1": (2 * ffn_size, 2),  # gate and up are split each on its own
        "linear_fc2": (ffn_size, 1),
    }
    for name, (length, stride) in lengths.items():
        tiles = math.lcm(train.tp * stride, gen.tp * stride)
        if length % tiles:
            raise ConfigError(f"megatron_core needs {name} to be cut in {tiles} tiles, got {length} % {tiles}")
