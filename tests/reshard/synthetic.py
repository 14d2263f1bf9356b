"""Layouts and scenarios of a model whose every tensor divides evenly, for comparison with closed forms."""

from functools import cache

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import Scenario, even_nodes
from megarl.reshard.layout.engine_ranks import needs_by_rank
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout

ROWS, COLUMNS, LAYERS = 192, 4, 48
TENSORS = {f"layers.{i}": TensorSpec((ROWS, COLUMNS), "float32") for i in range(LAYERS)}
MODEL_BYTES = LAYERS * ROWS * COLUMNS * 4


@cache
def shard(pp, pp_size, tp, tp_size, prefix):
    """Return the layout of stage `pp`'s layers, rows of tensor rank `tp`."""
    per_stage, rows = LAYERS // pp_size, ROWS // tp_size
    box, local = ((tp * rows, (tp + 1) * rows), (0, COLUMNS)), ((0, rows), (0, COLUMNS))
    layers = range(pp * per_stage, (pp + 1) * per_stage)
    return WeightLayout(TENSORS, tuple(ShardPiece(f"layers.{i}", box, f"{prefix}.{i}", local) for i in layers))


def trainers(grid):
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    return [shard(c.pp, grid.pp, c.tp, grid.tp, "train") for c in places]


def engine(tp):
    return tuple(shard(0, 1, i, tp, "gen") for i in range(tp))


def needs(placements):
    return needs_by_rank(placements, engine(len(placements[0])))


def scenario(p, t, d, tg, *, nodes=1, bucket_bytes=1 << 20):
    """Return the scenario p-t-d -> 1-tg of the synthetic model."""
    grid = RankGrid(pp=p, tp=t, dp=d)
    return Scenario(
        model="synthetic",
        grid=grid,
        gen_tp=tg,
        sources=tuple(trainers(grid)),
        engine=engine(tg),
        topology=even_nodes(grid.size, nodes),
        bucket_bytes=bucket_bytes,
    )
