"""Scenarios of the synthetic model."""

from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import Scenario, even_nodes
from tests.reshard import synthetic


def scenario(p, t, d, pg, tg, *, nodes=1, bucket_bytes=1 << 20):
    """Return the scenario p-t-d -> pg-tg of the synthetic model."""
    grid = RankGrid(pp=p, tp=t, dp=d)
    by_shard = {(s, i): synthetic.shard(s, p, i, t, "train") for s in range(p) for i in range(t)}
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    return Scenario(
        model="synthetic",
        grid=grid,
        gen_pp=pg,
        gen_tp=tg,
        sources=tuple(by_shard[c.pp, c.tp] for c in places),
        engine=tuple(tuple(synthetic.shard(s, pg, i, tg, "gen") for i in range(tg)) for s in range(pg)),
        topology=even_nodes(grid.size, nodes),
        bucket_bytes=bucket_bytes,
    )
