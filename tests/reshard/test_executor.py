"""Real ranks on gloo move a synthetic model; every byte is compared, and the books with the plan."""

import numpy as np
import pytest
import torch

from megarl.placement.grid import RankGrid
from megarl.reshard.bucket import map_bucket, torch_dtype
from megarl.reshard.groups import micro_dp_groups, strided_places
from megarl.reshard.layout import extent, slices
from megarl.reshard.plan import Topology, plan_moves
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


def reshard(grid, gen_pp, gen_tp):
    """On every rank: three syncs with changed weights; what each rank counted and how many elements are wrong."""
    import torch.distributed as dist

    from megarl.reshard.strategies.boxes import BoxStrategy
    from megarl.reshard.strategy import Outlets, SyncContext

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sources = synthetic.trainers(grid)
    needs = synthetic.needs(strided_places(grid, gen_tp=gen_tp, gen_pp=gen_pp), gen_pp, gen_tp)
    context = SyncContext(
        rank=rank,
        sources=sources,
        needs=needs,
        topology=Topology.single(grid.size),
        groups=micro_dp_groups(grid, gen_tp=gen_tp, gen_pp=gen_pp),
    )
    strategy, sink = BoxStrategy(context, BUCKET_BYTES), MemorySink(needs[rank])
    mismatched, books = 0, []
    for sync in range(3):
        mine = {p.local: value(p.tensor, sync)[slices(p.box)].clone() for p in sources[rank].pieces}
        sink.poison()
        books.append(strategy.push(mine, Outlets(boxes=sink)))
        for piece in needs[rank].pieces:
            got, want = sink.tensors[piece.local][slices(piece.local_box)], value(piece.tensor, sync)[slices(piece.box)]
            mismatched += int((got != want).sum())
    out = [None] * grid.size
    dist.all_gather_object(out, (mismatched, books))
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize(
    ("p", "t", "d", "pg", "tg"), [(1, 4, 1, 1, 2), (2, 2, 1, 1, 2), (2, 2, 1, 1, 1), (1, 2, 2, 1, 1)]
)
def test_three_syncs_are_bitwise_and_counted(p, t, d, pg, tg, tmp_path):
    grid = RankGrid(tp=t, dp=d, pp=p)
    results = run_ranks(reshard, grid.size, tmp_path, grid, pg, tg)
    assert [mismatched for mismatched, _ in results] == [0] * grid.size
    closed_form = (t * p - tg * pg) / (tg * pg * t * p) * synthetic.MODEL_BYTES
    moves = plan_moves(
        synthetic.trainers(grid),
        synthetic.needs(strided_places(grid, gen_tp=tg, gen_pp=pg), pg, tg),
        Topology.single(grid.size),
        groups=micro_dp_groups(grid, gen_tp=tg, gen_pp=pg),
    )
    for rank, (_, books) in enumerate(results):
        for stats in books:
            assert stats.bytes_received == closed_form
            assert stats.bytes_received == sum(m.num_bytes for m in moves if m.destination == rank and not m.is_local)
            assert stats.bytes_sent == sum(m.num_bytes for m in moves if m.source == rank and not m.is_local)
            assert stats.bytes_delivered == synthetic.MODEL_BYTES / (tg * pg)
            assert stats.peak_extra_bytes <= 2 * BUCKET_BYTES
            assert stats.buckets > 2
