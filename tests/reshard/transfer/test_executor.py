"""Real ranks on gloo move a synthetic model; every byte is compared, and the books with the plan."""

import numpy as np
import pytest
import torch

from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import extent, slices
from megarl.reshard.layout.micro_dp import consecutive_places, micro_dp_groups, strided_places
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.plan_cache import cached_index
from megarl.reshard.transfer.bucket import map_bucket, torch_dtype
from tests.megatron.ranks import run_ranks
from tests.reshard import synthetic

BUCKET_BYTES = 16_384


class MemorySink:
    """An engine's rank: parameters in this process, poisoned before each sync."""

    def __init__(self, layout):
        sizes = {}
        for piece in layout.pieces:
            have = sizes.get(piece.local, [0] * len(piece.local_box))
            sizes[piece.local] = [max(a, stop) for a, (_, stop) in zip(have, piece.local_box, strict=True)]
        self.tensors = {name: torch.full(size, float("nan")) for name, size in sizes.items()}

    def poison(self):
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))

    def load_boxes(self, index, bucket):
        data = map_bucket(bucket) if bucket else None
        for slot in bucket.slots if bucket else ():
            flat = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
            self.tensors[slot.local][slices(slot.local_box)] = flat.view(extent(slot.local_box))
        return lambda: None


def value(tensor, sync):
    """Another number for every element of every tensor and sync."""
    rng = np.random.default_rng([sync, int(tensor.split(".")[1])])
    return torch.from_numpy(rng.random(synthetic.TENSORS[tensor].shape, dtype=np.float32))


def reshard(grid, gen_pp, gen_tp, nodes, direct, alone):
    """On every rank: three syncs with changed weights; what each rank counted and how many elements are wrong.

    Args:
        nodes: by rank, its machine; more than one: anybody asks anybody, else micro-DP groups.
        direct: the engine's parameters are in this process.
        alone: bytes from which a box is a message of its own.
    """
    import torch.distributed as dist

    from megarl.reshard.planning import rounds
    from megarl.reshard.planning.strategy import Outlets, SyncContext
    from megarl.reshard.strategies.box_strategy import BoxStrategy
    from megarl.reshard.transfer.sink import Parameters

    rounds.ALONE_BYTES = alone
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sources = synthetic.trainers(grid)
    needs, groups = arrangement(grid, gen_pp, gen_tp, nodes)
    context = SyncContext(rank=rank, sources=sources, needs=needs, topology=Topology(nodes), groups=groups)
    strategy, sink = BoxStrategy(context, BUCKET_BYTES), MemorySink(needs[rank])
    mismatched, books = 0, []
    for sync in range(3):
        mine = {p.local: value(p.tensor, sync)[slices(p.box)].clone() for p in sources[rank].pieces}
        sink.poison()
        books.append(strategy.push(mine, Outlets(boxes=Parameters(sink.tensors) if direct else sink)))
        for piece in needs[rank].pieces:
            got, want = sink.tensors[piece.local][slices(piece.local_box)], value(piece.tensor, sync)[slices(piece.box)]
            mismatched += int((got != want).sum())
    strategy.close()
    out = [None] * grid.size
    dist.all_gather_object(out, (mismatched, books))
    dist.destroy_process_group()
    return out


def arrangement(grid, gen_pp, gen_tp, nodes):
    """Strided on one machine; on several, every machine as one engine after another."""
    if len(set(nodes)) == 1:
        groups = micro_dp_groups(grid, gen_tp=gen_tp, gen_pp=gen_pp)
        return synthetic.needs(strided_places(grid, gen_tp=gen_tp, gen_pp=gen_pp), gen_pp, gen_tp), groups
    return synthetic.needs(consecutive_places(grid.size, gen_tp=gen_tp, gen_pp=gen_pp), gen_pp, gen_tp), []


@pytest.mark.parametrize(
    ("layout", "nodes", "direct", "alone"),
    [
        ((1, 4, 1, 1, 2), 1, False, 1 << 18),
        ((1, 4, 1, 1, 2), 1, True, 512),
        ((2, 2, 1, 1, 1), 1, False, 512),
        ((2, 2, 1, 1, 2), 1, True, 1 << 18),
        ((1, 4, 1, 1, 1), 2, False, 512),
        ((1, 4, 1, 1, 1), 2, True, 512),
    ],
)
def test_three_syncs_are_bitwise_and_counted(layout, nodes, direct, alone, tmp_path):
    p, t, d, pg, tg = layout
    grid = RankGrid(tp=t, dp=d, pp=p)
    machines = tuple(rank * nodes // grid.size for rank in range(grid.size))
    results = run_ranks(reshard, grid.size, tmp_path, grid, pg, tg, machines, direct, alone)
    assert [mismatched for mismatched, _ in results] == [0] * grid.size
    needs, groups = arrangement(grid, pg, tg, machines)
    index = cached_index(synthetic.trainers(grid), needs, Topology(machines), BUCKET_BYTES, groups=groups)
    closed_form = (t * p - tg * pg) / (tg * pg * t * p) * synthetic.MODEL_BYTES
    sent = [stats.bytes_sent for _, books in results for stats in books]
    assert sum(sent) == 3 * grid.size * closed_form
    for rank, (_, books) in enumerate(results):
        for stats in books:
            assert stats.bytes_received == plan_rank(index, rank).bytes_received == closed_form
            assert stats.bytes_delivered == synthetic.MODEL_BYTES / (tg * pg)
            assert stats.peak_extra_bytes <= 2 * BUCKET_BYTES
            assert stats.buckets > 2
