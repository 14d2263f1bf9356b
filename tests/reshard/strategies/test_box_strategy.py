"""Boxes and full tensors in one sync, on real ranks."""

import mmap
from dataclasses import replace

import pytest

from megarl.errors import WeightSyncError
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import even_nodes
from megarl.reshard.layout.engine_ranks import place_engines_by_overlap, place_engines_strided
from megarl.reshard.layout.layout import WeightLayout, without
from megarl.reshard.layout.micro_dp import micro_dp_groups
from megarl.reshard.layout.overlap import layout_bytes
from megarl.reshard.planning.strategy import SyncContext, SyncStats
from megarl.reshard.strategies.box_strategy import BoxStrategy
from tests.megatron.ranks import run_ranks
from tests.reshard.strategies.test_gather_hf import (
    BUCKET_BYTES,
    TENSORS,
    gather_results,
    make_context,
    make_sources,
    push_on_rank,
    shard_group_layouts,
    split,
    value,
)

DERIVED = ("columns", "norm", "expert.1")
"""Tensors to send in full: split by columns, replicated over tensor ranks, and held by some ranks only."""
DERIVED_BYTES = sum(value(name, 0).nbytes for name in DERIVED)


def engine_layouts(tp: int) -> list[WeightLayout]:
    return shard_group_layouts(tp, tuple(TENSORS))


def box_context(grid: RankGrid, gen_tp: int, *, micro_dp: bool) -> SyncContext:
    """Return the context of rank 0."""
    engine, replicas, topology = engine_layouts(gen_tp), grid.size // gen_tp, even_nodes(grid.size, 1)
    if micro_dp:
        placed = place_engines_strided(grid, gen_tp=gen_tp)
    else:
        placed = place_engines_by_overlap(make_sources(grid), [engine], replicas=replicas, topology=topology)
    return make_context(
        grid,
        senders=sorted(group[0] for (group,) in placed),
        needs={server: engine[tp] for (group,) in placed for tp, server in enumerate(group)},
        groups=micro_dp_groups(grid, gen_tp=gen_tp) if micro_dp else (),
        full_tensors=DERIVED,
    )


@pytest.mark.parametrize(
    ("sizes", "gen_tp", "micro_dp"),
    [
        ({"tp": 4}, 2, True),
        ({"tp": 2, "dp": 2}, 1, True),
        ({"tp": 3}, 2, False),
        ({"tp": 1, "dp": 2}, 2, False),
        ({"tp": 2, "pp": 2}, 4, False),
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 1}, 2, False),
    ],
    ids=str,
)
def test_some_tensors_in_full_and_all_others_as_boxes(sizes, gen_tp, micro_dp, tmp_path):
    grid = RankGrid(**sizes)
    context = box_context(grid, gen_tp, micro_dp=micro_dp)
    results = run_ranks(push_on_rank, grid.size, tmp_path, BoxStrategy, context)
    for rank, (wrong, calls, all_stats) in enumerate(results):
        assert wrong == []
        assert all_stats[0] == all_stats[1]
        assert calls[0] == sorted(calls[0], reverse=True)  # full tensors first
        assert ("whole" in calls[0]) == (rank in context.senders)
        assert all_stats[0].buckets >= len(set(calls[0]))
        delivered = layout_bytes(without(context.needs[rank], DERIVED)) if rank in context.needs else 0
        assert all_stats[0].bytes_delivered == delivered + (DERIVED_BYTES if rank in context.senders else 0)
        # two buckets of full tensors and those of boxes, none smaller than a page
        assert all_stats[0].peak_extra_bytes <= 4 * mmap.PAGESIZE + 2 * BUCKET_BYTES
    assert sum(b[0].bytes_sent for _, _, b in results) == sum(b[0].bytes_received for _, _, b in results)


def test_full_tensors_are_excluded_from_boxes():
    (layout,) = engine_layouts(1)
    remaining = without(layout, DERIVED)
    assert list(remaining.pieces) == [piece for piece in split(0, 1, tuple(TENSORS)) if piece.tensor not in DERIVED]
    assert remaining.tensors is layout.tensors
    assert without(layout, ()) is layout


def fail_to_plan(context: SyncContext):
    """Create a strategy, whose rank 1 needs a tensor that does not exist; return the errors of all ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with pytest.raises(WeightSyncError) as error:
        BoxStrategy(replace(context, rank=rank, full_tensors=("norm", "nobody.has.it")[: rank + 1]), BUCKET_BYTES)
    return gather_results(str(error.value))


def test_all_ranks_raise_if_one_cannot_plan(tmp_path):
    """The others would wait in the creation of groups."""
    errors = run_ranks(fail_to_plan, 2, tmp_path, box_context(RankGrid(tp=2), 1, micro_dp=True))
    text = "rank 1: nobody.has.it: the engine needs the full tensor, but the trainer's model has no such tensor"
    assert errors == [text, text]


def test_stats_of_two_parts_add_up():
    first = SyncStats(bytes_sent=1, bytes_received=2, bytes_delivered=3, buckets=4, peak_extra_bytes=9, messages=5)
    second = replace(first, peak_extra_bytes=7, collectives=6)
    assert first + second == SyncStats(
        bytes_sent=2, bytes_received=4, bytes_delivered=6, buckets=8, peak_extra_bytes=9, messages=10, collectives=6
    )
