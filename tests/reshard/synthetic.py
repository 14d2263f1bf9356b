"""Layouts of a model whose every tensor divides evenly, for comparison with closed forms."""

from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout

ROWS, COLUMNS, LAYERS = 192, 4, 48
TENSORS = {f"layers.{i}": TensorSpec((ROWS, COLUMNS), "float32") for i in range(LAYERS)}
MODEL_BYTES = LAYERS * ROWS * COLUMNS * 4


def shard(pp, pp_size, tp, tp_size, prefix):
    """Return the layout of stage `pp`'s layers, rows of tensor rank `tp`."""
    per_stage, rows = LAYERS // pp_size, ROWS // tp_size
    pieces = [
        ShardPiece(
            f"layers.{i}", ((tp * rows, (tp + 1) * rows), (0, COLUMNS)), f"{prefix}.{i}", ((0, rows), (0, COLUMNS))
        )
        for i in range(pp * per_stage, (pp + 1) * per_stage)
    ]
    return WeightLayout(TENSORS, tuple(pieces))


def trainers(grid):
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    return [shard(c.pp, grid.pp, c.tp, grid.tp, "train") for c in places]


def needs(places, gen_pp, gen_tp):
    return {rank: shard(p.pp, gen_pp, p.tp, gen_tp, "gen") for rank, p in enumerate(places)}
