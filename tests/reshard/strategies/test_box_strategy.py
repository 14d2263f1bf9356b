"""Boxes and full tensors in one sync, on real ranks."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import even_nodes
from megarl.reshard.layout.engine_ranks import EnginePlacement, place_engines_by_overlap, place_engines_strided
from megarl.reshard.layout.layout import WeightLayout, extent, slices, volume, without
from megarl.reshard.layout.micro_dp import micro_dp_groups, model_replicas
from megarl.reshard.layout.overlap import layout_bytes
from megarl.reshard.planning.strategy import Sinks, SyncContext, SyncStats
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.transfer.bucket import map_bucket, open_bucket, torch_dtype
from tests.megatron.ranks import run_ranks
from tests.reshard.strategies.test_gather_hf import TENSORS, make_sources, shard_group_layouts, split, value
from tests.time_limits import HANG_SECONDS

BUCKET_BYTES = 4000
DERIVED = ("columns", "norm", "expert.1")
"""Tensors to send in full: split by columns, replicated over tensor ranks, and held by some ranks only."""
DERIVED_BYTES = sum(value(name, 0).nbytes for name in DERIVED)


def engine_layouts(tp: int) -> list[WeightLayout]:
    return shard_group_layouts(tp, tuple(TENSORS))


def servers(grid: RankGrid, gen_tp: int, *, micro_dp: bool) -> list[EnginePlacement]:
    replicas = grid.size // gen_tp
    if micro_dp:
        return place_engines_strided(grid, gen_tp=gen_tp)
    topology = even_nodes(grid.size, 1)
    return place_engines_by_overlap(make_sources(grid), [engine_layouts(gen_tp)], replicas=replicas, topology=topology)


def make_context(grid: RankGrid, gen_tp: int, *, micro_dp: bool, rank: int, full_tensors=DERIVED) -> SyncContext:
    engine, placed = engine_layouts(gen_tp), servers(grid, gen_tp, micro_dp=micro_dp)
    return SyncContext(
        rank=rank,
        sources=make_sources(grid),
        topology=even_nodes(grid.size, 1),
        needs={server: engine[tp] for (group,) in placed for tp, server in enumerate(group)},
        groups=micro_dp_groups(grid, gen_tp=gen_tp) if micro_dp else (),
        senders=sorted(group[0] for (group,) in placed),
        full_tensors=full_tensors,
        model_replicas=model_replicas(grid),
    )


class Engine:
    """A fake engine rank that records what it receives, and in which way."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.full_tensors: dict[str, torch.Tensor] = {}
        self.boxes: dict[str, torch.Tensor] = {}

    def load(self, bucket):
        self.calls.append("whole")
        self.full_tensors.update({name: tensor.clone() for name, tensor in open_bucket(bucket).items()})
        return lambda: None

    def load_boxes(self, index, bucket):
        self.calls.append("boxes")
        data = map_bucket(bucket) if bucket else None
        for slot in bucket.slots if bucket else ():
            flat = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
            full = self.boxes.setdefault(slot.local, torch.full(TENSORS[slot.local].shape, torch.nan, dtype=flat.dtype))
            full[slices(slot.local_box)] = flat.view(extent(slot.local_box))
        return lambda: None


def push_on_rank(grid: RankGrid, gen_tp: int, micro_dp: bool):
    """Run two syncs with changed weights on every rank; return errors, the order of calls, and statistics."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    context = make_context(grid, gen_tp, micro_dp=micro_dp, rank=rank)
    strategy = BoxStrategy(context, BUCKET_BYTES)
    wrong: list[str] = []
    all_stats: list[SyncStats] = []
    calls: list[list[str]] = []
    for sync in range(2):
        held = {p.local: value(p.tensor, sync)[slices(p.box)].clone() for p in context.sources[rank].pieces}
        engine = Engine()
        sinks = (engine,) if rank in context.senders else ()
        serves = rank in context.needs
        all_stats.append(strategy.push(held, Sinks(full_tensors=sinks, boxes=engine if serves else None)))
        calls.append(engine.calls)
        if sinks:
            wrong += [f"{n} came whole" for n in set(engine.full_tensors) ^ set(DERIVED)]
            wrong += [n for n in DERIVED if not torch.equal(engine.full_tensors[n], value(n, sync))]
        for piece in (p for p in (context.needs[rank].pieces if serves else ()) if volume(p.box)):
            if piece.tensor in DERIVED:
                wrong += [f"{piece.tensor} came as boxes"] if piece.local in engine.boxes else []
            elif not torch.equal(
                engine.boxes[piece.local][slices(piece.local_box)], value(piece.tensor, sync)[slices(piece.box)]
            ):
                wrong.append(piece.tensor)
    strategy.close()
    out = [None] * grid.size
    dist.all_gather_object(out, (wrong, calls, all_stats))
    dist.destroy_process_group()
    return out


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
    results = run_ranks(push_on_rank, grid.size, tmp_path, grid, gen_tp, micro_dp)
    context = make_context(grid, gen_tp, micro_dp=micro_dp, rank=0)
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


def test_full_tensors_are_excluded_from_boxes() -> None:
    (layout,) = engine_layouts(1)
    remaining = without(layout, DERIVED)
    assert list(remaining.pieces) == [piece for piece in split(0, 1, tuple(TENSORS)) if piece.tensor not in DERIVED]
    assert remaining.tensors is layout.tensors
    assert without(layout, ()) is layout


def fail_to_plan(full_tensors: list[tuple[str, ...]]):
    """Create a strategy whose rank r needs `full_tensors[r]` in full; return the errors of all ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    context = make_context(RankGrid(tp=2), 1, micro_dp=True, rank=rank, full_tensors=full_tensors[rank])
    with pytest.raises(WeightSyncError) as error:
        BoxStrategy(context, BUCKET_BYTES)
    errors: list[str] = [""] * len(full_tensors)
    dist.all_gather_object(errors, str(error.value))
    dist.destroy_process_group()
    return errors


def test_all_ranks_raise_if_one_cannot_plan(tmp_path) -> None:
    """The others would wait in the creation of groups."""
    errors = run_ranks(fail_to_plan, 2, tmp_path, [("norm",), ("norm", "nobody.has.it")], timeout=HANG_SECONDS)
    text = "rank 1: nobody.has.it: the engine needs the full tensor, but the trainer's model has no such tensor"
    assert errors == [text, text]


def test_stats_of_two_parts_add_up() -> None:
    first = SyncStats(bytes_sent=1, bytes_received=2, bytes_delivered=3, buckets=4, peak_extra_bytes=9, messages=5)
    second = replace(first, peak_extra_bytes=7, collectives=6)
    assert first + second == SyncStats(
        bytes_sent=2, bytes_received=4, bytes_delivered=6, buckets=8, peak_extra_bytes=9, messages=10, collectives=6
    )
