"""Syncs on real ranks: full tensors on every rank of a replica, and boxes; their plans and closed forms."""

import mmap
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import WeightSyncError
from megarl.model_files.header import itemsize
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.nccl_progress import PostedGroup, find_stalls
from megarl.reshard.analysis.scenario import Arrangement, arrange, even_nodes
from megarl.reshard.layout.engine_ranks import (
    micro_dp_groups,
    model_replicas,
    place_engines_by_overlap,
    place_engines_strided,
)
from megarl.reshard.layout.layout import (
    ShardPiece,
    TensorSpec,
    WeightLayout,
    WeightNeeds,
    extent,
    full_local,
    slices,
    volume,
)
from megarl.reshard.planning.strategy import Sinks, SyncContext
from megarl.reshard.strategies import gather_hf
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.strategies.gather_hf import GatherHf, plan_buckets
from megarl.reshard.transfer import transport
from megarl.reshard.transfer.bucket import lay_out, map_bucket, torch_dtype
from megarl.reshard.transfer.transport import Transport
from tests.errors import expect_error
from tests.megatron.ranks import CollectingSink, run_ranks
from tests.reshard.rank_process import held_tensors, kept_buffers, wrong_elements
from tests.reshard.synthetic import MODEL_BYTES, scenario
from tests.time_limits import UNREACHED_SECONDS

TENSORS = {
    "rows": TensorSpec((8, 6), "float32"),
    "columns": TensorSpec((4, 12), "bfloat16"),
    "norm": TensorSpec((33,), "float32"),
    "large": TensorSpec((101, 20), "float32"),
    "last": TensorSpec((5, 3), "bfloat16"),
    "expert.0": TensorSpec((6, 4), "bfloat16"),
    "expert.1": TensorSpec((6, 4), "bfloat16"),
}
WHOLE_EVERYWHERE = ("norm", "last")
EXPERTS = ("expert.0", "expert.1")
BUCKET_BYTES = 4000
DENSE = tuple(name for name in TENSORS if name not in EXPERTS)


def split(rank, size, names=tuple(TENSORS)):
    """Split rows, or columns of one tensor, over `size` ranks, the last part shorter; replicate vectors."""
    pieces = []
    for name in names:
        box = list(TENSORS[name].box)
        if name not in WHOLE_EVERYWHERE:
            dim = 1 if name == "columns" else 0
            length = TENSORS[name].shape[dim]
            part = -(-length // size)
            box[dim] = (min(rank * part, length), min((rank + 1) * part, length))
        local = tuple((0, stop - start) for start, stop in box)
        pieces.append(ShardPiece(name, tuple(box), name, local))
    return pieces


def shard_group_layouts(size, names=tuple(TENSORS)):
    return [WeightLayout(TENSORS, tuple(split(rank, size, names))) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1000, 10**9])
def test_every_tensor_is_gathered_in_full_in_bounded_buckets(size, bucket_bytes):
    plans = plan_buckets([[[shard_group_layouts(size)]]], bucket_bytes)
    assert [slot.name for plan in plans for slot in plan.slots] == list(TENSORS)
    for plan in plans:
        assert plan.num_bytes <= bucket_bytes or len(plan.slots) == 1
        assert plan.num_bytes == lay_out((s.name, torch_dtype(s.dtype), s.shape) for s in plan.slots)[1]
    for gather in (gather for plan in plans for gather in plan.gathers):
        name = gather.slot.name
        assert gather.is_gathered == (size > 1 and name not in WHOLE_EVERYWHERE)
        assert len(gather.parts) == size
        for parts in [gather.parts] if gather.is_gathered else [(part,) for part in gather.parts]:
            seen = np.zeros(TENSORS[name].shape, int)
            for piece in (piece for part in parts for piece in part):
                assert piece.tensor == name
                seen[slices(piece.box)] += 1
            assert (seen == 1).all()


def test_buckets_are_packed_tightly():
    sizes = [lay_out([(n, torch_dtype(s.dtype), s.shape)])[1] for n, s in TENSORS.items()]
    held = [[[shard_group_layouts(1)]]]
    assert [len(plan_buckets(held, size)) for size in (sum(sizes), sum(sizes) - 1, 1)] == [1, 2, len(TENSORS)]


def test_stages_and_experts_use_the_shard_group_that_holds_them():
    stages = [shard_group_layouts(2, DENSE[:2]), shard_group_layouts(2, DENSE[1:])]
    expert_groups = [shard_group_layouts(1, EXPERTS[:1]), shard_group_layouts(1, EXPERTS[1:])]
    (plan,) = plan_buckets([[stages], [expert_groups]], 10**9)
    assert [(g.kind, g.shard_group) for g in plan.gathers] == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 1), (1, 0), (1, 1)]


def test_error_names_tensor_with_missing_elements():
    lacks_norm = shard_group_layouts(1, tuple(name for name in DENSE if name != "norm"))
    for tensor, found, held in (("rows", "24 of 48", shard_group_layouts(2)[:1]), ("norm", "0 of 33", lacks_norm)):
        with pytest.raises(WeightSyncError, match=rf"^{tensor}: the tensor-parallel ranks .* hold {found} elements$"):
            plan_buckets([[[held]]], 10**9)


def test_partially_overlapping_boxes_are_rejected():
    spec = {"w": TensorSpec((4,), "float32")}
    layouts = [WeightLayout(spec, (ShardPiece("w", (box,), "w", ((0, 3),)),)) for box in ((0, 3), (1, 4))]
    with expect_error(AssertionError, "overlap"):
        plan_buckets([[[layouts]]], 10**9)


@pytest.mark.parametrize(("p", "t", "d"), [(1, 4, 2), (1, 8, 1), (2, 4, 2), (4, 2, 1), (1, 1, 2)])
def test_received_bytes_match_closed_form(p, t, d):
    """A rank receives (t - 1) / t of what its stage holds, and all of what the other stages hold."""
    case = scenario(p, t, d, 1, bucket_bytes=8192)
    stats = forecast(arrange("gather_hf", case), case).stats
    fraction = (t - 1) / t / p + (p - 1) / p
    assert {of_rank.bytes_received for of_rank in stats} == {fraction * MODEL_BYTES}
    assert {of_rank.bytes_delivered for of_rank in stats} == {MODEL_BYTES}
    one_tensor = MODEL_BYTES // 48
    # two buckets, and the tensors that are gathered for one of them
    assert {of_rank.peak_extra_bytes for of_rank in stats} == {3 * (8192 // one_tensor) * one_tensor}


def test_replicas_without_sender_stay_idle():
    case = scenario(1, 2, 3, 4)  # one engine, on ranks 0 to 3; ranks 4 and 5 are a separate replica
    stats = forecast(arrange("gather_hf", case), case).stats
    assert [s.bytes_received for s in stats] == [MODEL_BYTES / 2] * 4 + [0, 0]
    assert [s.peak_extra_bytes > 0 for s in stats] == [True] * 4 + [False] * 2


def value(tensor, sync):
    rng = np.random.default_rng([sync, list(TENSORS).index(tensor)])
    spec = TENSORS[tensor]
    return torch.from_numpy(rng.random(spec.shape)).to(torch_dtype(spec.dtype))


def make_sources(grid):
    """Split dense tensors over tensor ranks, the first two on the first stage; one expert per expert-parallel rank."""
    layouts = []
    for rank in range(grid.size):
        at, expert = grid.coordinates(rank), grid.expert_coordinates(rank)
        names = DENSE if grid.pp == 1 else (DENSE[:2], DENSE[2:])[at.pp]
        held = split(at.tp, grid.tp, names)
        if at.pp == grid.pp - 1:
            held += split(expert.etp, grid.expert_tp, EXPERTS if grid.ep == 1 else EXPERTS[expert.ep : expert.ep + 1])
        layouts.append(WeightLayout(TENSORS, tuple(held)))
    return layouts


def make_context(grid, senders=(0,), **fields):
    """Return the context of rank 0."""
    replicas, topology = model_replicas(grid), even_nodes(grid.size, 1)
    sources = make_sources(grid)
    return SyncContext(rank=0, sources=sources, topology=topology, senders=senders, model_replicas=replicas, **fields)


def make_on_rank(make, context, bucket_bytes, timeout_seconds=UNREACHED_SECONDS):
    """Return a strategy of this rank, and the tensors that the rank holds."""
    dist.init_process_group("gloo")
    strategy = make(replace(context, rank=dist.get_rank()), bucket_bytes, timeout_seconds)
    return strategy, held_tensors(context.sources[dist.get_rank()], value, 0)


def gather_results(mine):
    """Return the results of all ranks, by rank."""
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    dist.destroy_process_group()
    return out


class Engine(CollectingSink):
    """A fake engine rank that records what it receives."""

    def __init__(self):
        super().__init__()
        self.boxes = {}

    def load_boxes(self, index, bucket):
        data = map_bucket(bucket) if bucket else None
        for slot in bucket.slots if bucket else ():
            flat = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
            shape = TENSORS[slot.local.removeprefix(full_local(""))].shape
            full = self.boxes.setdefault(slot.local, torch.full(shape, torch.nan, dtype=flat.dtype))
            full[slices(slot.local_box)] = flat.view(extent(slot.local_box))
        return lambda: None


def push_on_rank(make, context):
    """Run three syncs with changed weights on every rank; return what is wrong, and statistics."""
    strategy, _ = make_on_rank(make, context, BUCKET_BYTES)
    rank = dist.get_rank()
    need, wrong, all_stats, kept = context.needs.get(rank), [], [], []
    for sync in range(3):
        engine = Engine()
        sinks = (engine,) if rank in context.senders else ()
        held = held_tensors(context.sources[rank], value, sync)
        all_stats.append(strategy.push(held, Sinks(full_tensors=sinks, boxes=None if need is None else engine)))
        wrong += [f"{name} came whole" for name in set(engine.tensors) ^ (set(TENSORS) if sinks else set())]
        wrong += [name for name, tensor in engine.tensors.items() if not torch.equal(tensor, value(name, sync))]
        if need is not None:
            boxes = [p for p in need.pieces if volume(p.box)]
            wrong += [f"{name} came as boxes" for name in engine.boxes.keys() - {p.local for p in boxes}]
            if wrong_elements(WeightLayout(need.tensors, tuple(boxes)), engine.boxes, value, sync):
                wrong.append("boxes")
        kept.append(kept_buffers())
    wrong += ["other buffers"] * (kept != [kept[0]] * 3 or sum(kept[0].values()) != all_stats[0].peak_extra_bytes)
    strategy.close()
    wrong += [f"{buffer} is not freed" for buffer in kept_buffers()]
    return gather_results((wrong, all_stats))


@pytest.mark.parametrize(
    ("sizes", "senders"),
    [
        ({"tp": 3}, [0, 1, 2]),
        ({"tp": 2, "pp": 2}, [0, 3]),
        ({"tp": 2, "dp": 2}, [1]),
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 1}, [0, 2]),
        ({"tp": 1, "dp": 2, "ep": 2}, [0]),
        ({"tp": 1}, [0]),
    ],
    ids=str,
)
def test_real_ranks_are_bitwise_exact_and_match_planned_counts(sizes, senders, tmp_path):
    grid = RankGrid(**sizes)
    sources, engine = tuple(make_sources(grid)), ((make_sources(RankGrid())[0],),)
    topology = even_nodes(grid.size, 1)
    case = scenario(1, 1, 1, 1, bucket_bytes=BUCKET_BYTES)
    case = replace(case, grid=grid, sources=sources, engine=engine, topology=topology)
    needs = arrange("gather_hf", case).needs
    planned = forecast(Arrangement(strategy="gather_hf", needs={rank: needs[rank] for rank in senders}), case).stats
    results = run_ranks(push_on_rank, grid.size, tmp_path, GatherHf, make_context(grid, senders))
    for rank, (wrong, all_stats) in enumerate(results):
        assert wrong == []
        assert all_stats == [planned[rank]] * 3
        # the largest tensor, which has a bucket of its own, takes up to 3 * 2720 bytes with its padding
        assert all_stats[0].peak_extra_bytes <= 2 * max(mmap.PAGESIZE, 8192) + 3 * 2720


class FailingEngine(Engine):
    """A fake engine that fails once it has received something."""

    def load(self, bucket):
        super().load(bucket)
        return self._fail

    def load_boxes(self, index, bucket):
        super().load_boxes(index, bucket)
        return self._fail

    def _fail(self):
        raise WeightSyncError("the engine has failed")


def push_to_failing_engine(make, context):
    """Push with an engine that works, one that fails, and a new strategy's; return the buffers after each."""
    kept = []
    strategy, held = make_on_rank(make, context, BUCKET_BYTES)
    for engine in (Engine(), FailingEngine()):
        try:
            strategy.push(held, Sinks(full_tensors=(engine,), boxes=engine))
        except WeightSyncError as error:
            kept.append(str(error))
        kept.append(kept_buffers())
    return gather_results(kept)


@pytest.mark.parametrize("make", [GatherHf, BoxStrategy])
def test_buffers_are_freed_when_an_engine_has_failed(make, tmp_path):
    """It may still read them."""
    context = box_context(RankGrid(tp=1), 1, micro_dp=False)
    ((kept, error, left),) = run_ranks(push_to_failing_engine, 1, tmp_path, make, replace(context, senders=(0,)))
    assert kept
    assert error == "the engine has failed"
    assert left == {}


STALLED = 1


def push_with_stalled_rank(grid):
    """Push without rank `STALLED`; return the error of each rank."""
    strategy, held = make_on_rank(GatherHf, make_context(grid), 10**9, timeout_seconds=1.0)
    if dist.get_rank() == STALLED:
        return gather_results(None)
    with pytest.raises(WeightSyncError) as error:
        strategy.push(held, Sinks())
    strategy.close()
    return gather_results(str(error.value))


def test_push_ends_at_its_deadline(tmp_path):
    grid = RankGrid(tp=2, pp=2)
    errors = run_ranks(push_with_stalled_rank, grid.size, tmp_path, grid)
    assert errors.pop(STALLED) is None
    for rank, error in zip((0, 2, 3), errors, strict=True):
        assert error.startswith(f"rank {rank}: full tensors: "), error
    assert "nothing from rank 1 within 1 s" in errors[0]


def record_on_rank(grid, bucket_bytes):
    """Push on every rank, rank 0 delivers; return the groups of collectives that each rank posted, in order.

    A group is (kind of collective, name and ranks of the process group, sizes in bytes). Also return the number of
    buckets, and of messages in each wait.
    """
    events, waits = [], []

    def wait_for(messages, deadline):
        waits.append(len(messages))
        transport.wait_for(messages, deadline)

    def record(kind, group, sizes):
        events.append((kind, (group.group_name, tuple(dist.get_process_group_ranks(group))), tuple(sizes)))

    class Recorder(Transport):
        def start_all_gathers(self, gathers, group):
            record("all_gather", group, (out.nbytes for out, _ in gathers))
            return super().start_all_gathers(gathers, group)

        def start_broadcasts(self, broadcasts, group):
            if broadcasts:
                record("broadcast", group, ((tensor.nbytes, source) for tensor, source in broadcasts))
            return super().start_broadcasts(broadcasts, group)

    gather_hf.wait_for, gather_hf.Transport = wait_for, Recorder
    strategy, held = make_on_rank(GatherHf, make_context(grid), bucket_bytes)
    strategy.push(held, Sinks())
    strategy.close()
    return gather_results((events, len(strategy._plans), waits))


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "ep": 2, "etp": 1}], ids=str)
def test_collectives_progress_by_the_rules_of_nccl(sizes, tmp_path):
    grid = RankGrid(**sizes)
    by_rank = [events for events, _, _ in run_ranks(record_on_rank, grid.size, tmp_path, grid, 4000)]
    assert all(by_rank[:2])
    for name, members in {event[1] for events in by_rank for event in events}:
        calls = [[event for event in by_rank[member] if event[1] == (name, members)] for member in members]
        assert calls == [calls[0]] * len(members)  # the same on all of them
    posted = [[PostedGroup(all_gathers=1, communicator=members) for _, (_, members), _ in each] for each in by_rank]
    assert find_stalls(posted) == []
    assert find_stalls([posted[0], posted[1][:-1], *posted[2:]]) != []


def test_all_tensors_of_a_bucket_are_gathered_together(tmp_path):
    """A rank waits once for the all-gathers and once for the broadcasts of a bucket, however many tensors it has."""
    for _, num_buckets, waits in run_ranks(record_on_rank, 4, tmp_path, RankGrid(tp=2, pp=2), 10**9):
        assert (num_buckets, len(waits), waits[1]) == (1, 2, len(TENSORS))


DERIVED = ("columns", "norm", "expert.1")
"""Tensors to send in full: split by columns, replicated over tensor ranks, and held by some ranks only."""


def box_context(grid, gen_tp, *, micro_dp):
    """Return the context of rank 0."""
    needs = WeightNeeds(layouts=tuple(shard_group_layouts(gen_tp)), full_tensors=DERIVED)
    engine, replicas, topology = needs.received(), grid.size // gen_tp, even_nodes(grid.size, 1)
    if micro_dp:
        placed = place_engines_strided(grid, gen_tp=gen_tp)
    else:
        placed = place_engines_by_overlap(make_sources(grid), engine, replicas=replicas, topology=topology)
    return make_context(
        grid,
        senders=(),
        needs={server: engine[tp] for group in placed for tp, server in enumerate(group)},
        groups=micro_dp_groups(grid, gen_tp=gen_tp) if micro_dp else (),
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
    for rank, (wrong, all_stats) in enumerate(results):
        assert wrong == []
        assert all_stats == [all_stats[0]] * 3
        need = context.needs.get(rank)
        delivered = sum(volume(p.box) * itemsize(need.tensors[p.tensor].dtype) for p in need.pieces) if need else 0
        assert all_stats[0].bytes_delivered == delivered
        # two buckets, neither smaller than a page
        assert all_stats[0].peak_extra_bytes <= 2 * mmap.PAGESIZE + 2 * BUCKET_BYTES
    assert sum(b[0].bytes_sent for _, b in results) == sum(b[0].bytes_received for _, b in results)


def test_full_tensors_are_received_as_one_piece_each():
    layouts = tuple(shard_group_layouts(2))
    for layout, received in zip(layouts, WeightNeeds(layouts=layouts, full_tensors=DERIVED).received(), strict=True):
        others = [piece for piece in layout.pieces if piece.tensor not in DERIVED]
        boxes = {name: tuple((0, length) for length in TENSORS[name].shape) for name in DERIVED}
        full = [ShardPiece(name, box, f"full tensor {name}", box) for name, box in boxes.items()]
        assert list(received.pieces) == others + full
        assert received.tensors is layout.tensors
    assert WeightNeeds(layouts=layouts, full_tensors=()).received() == layouts


def fail_to_plan(context):
    """Create a strategy, in which rank 1 sees that nobody holds the norm; return the errors of all ranks."""
    dist.init_process_group("gloo")
    rank, sources = dist.get_rank(), context.sources
    if rank == 1:
        sources = [WeightLayout(each.tensors, [p for p in each.pieces if p.tensor != "norm"]) for each in sources]
    with pytest.raises(WeightSyncError) as error:
        BoxStrategy(replace(context, rank=rank, sources=sources), BUCKET_BYTES, UNREACHED_SECONDS)
    return gather_results(str(error.value))


def test_all_ranks_raise_if_one_cannot_plan(tmp_path):
    """The others would wait in the creation of groups."""
    errors = run_ranks(fail_to_plan, 2, tmp_path, box_context(RankGrid(tp=2), 1, micro_dp=True))
    assert errors[0] == errors[1]
    assert re.match(r"rank 1: norm: rank \d needs .*, of which no trainer rank holds", errors[0]), errors
