"""Full tensors on every rank of a replica: the plan, its closed forms, and real ranks against it."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.scenario import Scenario, arrange, even_nodes
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.layout.micro_dp import model_replicas
from megarl.reshard.planning.strategy import Sinks, SyncContext
from megarl.reshard.strategies.gather_hf import GatherHf
from megarl.reshard.strategies.gather_plan import plan_buckets
from megarl.reshard.transfer import transport
from megarl.reshard.transfer.bucket import lay_out, open_bucket, torch_dtype
from megarl.reshard.transfer.byte_counter import ByteCounter
from tests.megatron.ranks import run_ranks
from tests.reshard.scenarios import scenario
from tests.reshard.synthetic import MODEL_BYTES
from tests.time_limits import HANG_SECONDS

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
DENSE = tuple(name for name in TENSORS if name not in EXPERTS)


def split(rank: int, size: int, names=DENSE) -> list[ShardPiece]:
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


def shard_group_layouts(size: int, names=DENSE) -> list[WeightLayout]:
    return [WeightLayout(TENSORS, tuple(split(rank, size, names))) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1000, 10**9])
def test_every_tensor_is_gathered_in_full_in_bounded_buckets(size: int, bucket_bytes: int) -> None:
    plans = plan_buckets([[[shard_group_layouts(size, tuple(TENSORS))]]], bucket_bytes)
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


def test_buckets_are_packed_tightly() -> None:
    sizes = [lay_out([(n, torch_dtype(s.dtype), s.shape)])[1] for n, s in TENSORS.items()]
    held = [[[shard_group_layouts(1, tuple(TENSORS))]]]
    assert [len(plan_buckets(held, size)) for size in (sum(sizes), sum(sizes) - 1, 1)] == [1, 2, len(TENSORS)]


def test_stages_and_experts_use_the_shard_group_that_holds_them() -> None:
    stages = [shard_group_layouts(2, DENSE[:2]), shard_group_layouts(2, DENSE[1:])]
    expert_groups = [shard_group_layouts(1, EXPERTS[:1]), shard_group_layouts(1, EXPERTS[1:])]
    (plan,) = plan_buckets([[stages], [expert_groups]], 10**9)
    assert [(g.kind, g.shard_group) for g in plan.gathers] == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 1), (1, 0), (1, 1)]


def test_error_names_tensor_with_missing_elements() -> None:
    lacks_norm = shard_group_layouts(1, tuple(name for name in DENSE if name != "norm"))
    for tensor, found, held in (("rows", "24 of 48", shard_group_layouts(2)[:1]), ("norm", "0 of 33", lacks_norm)):
        with pytest.raises(WeightSyncError, match=rf"^{tensor}: the tensor-parallel ranks .* hold {found} elements$"):
            plan_buckets([[[held]]], 10**9)


def test_partially_overlapping_boxes_are_rejected() -> None:
    spec = {"w": TensorSpec((4,), "float32")}
    layouts = [WeightLayout(spec, (ShardPiece("w", (box,), "w", ((0, 3),)),)) for box in ((0, 3), (1, 4))]
    with pytest.raises(AssertionError, match="overlap in part"):
        plan_buckets([[[layouts]]], 10**9)


@pytest.mark.parametrize(("p", "t", "d"), [(1, 4, 2), (1, 8, 1), (2, 4, 2), (4, 2, 1), (1, 1, 2)])
def test_received_bytes_match_closed_form(p, t, d):
    """A rank receives (t - 1) / t of what its stage holds, and all of what the other stages hold."""
    case = scenario(p, t, d, 1, 1, bucket_bytes=8192)
    stats = forecast(arrange("gather_hf", case), case).stats
    fraction = (t - 1) / t / p + (p - 1) / p
    assert {of_rank.bytes_received for of_rank in stats} == {fraction * MODEL_BYTES}
    assert {of_rank.bytes_delivered for of_rank in stats} == {MODEL_BYTES}
    one_tensor = MODEL_BYTES // 48
    # two buckets, and the tensors that are gathered for one of them
    assert {of_rank.peak_extra_bytes for of_rank in stats} == {3 * (8192 // one_tensor) * one_tensor}


def test_replicas_without_sender_stay_idle():
    case = scenario(1, 2, 3, 1, 4)  # one engine, on ranks 0 to 3; ranks 4 and 5 are a separate replica
    stats = forecast(arrange("gather_hf", case), case).stats
    assert [s.bytes_received for s in stats] == [MODEL_BYTES / 2] * 4 + [0, 0]
    assert [s.peak_extra_bytes > 0 for s in stats] == [True] * 4 + [False] * 2


def value(tensor: str, sync: int) -> torch.Tensor:
    rng = np.random.default_rng([sync, list(TENSORS).index(tensor)])
    spec = TENSORS[tensor]
    return torch.from_numpy(rng.random(spec.shape)).to(torch_dtype(spec.dtype))


class Sink:
    """A sink that keeps a copy of what it receives."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, bucket):
        self.tensors.update({name: tensor.clone() for name, tensor in open_bucket(bucket).items()})
        return lambda: None


def make_sources(grid: RankGrid) -> list[WeightLayout]:
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


def push_on_rank(grid: RankGrid, senders: list[int]):
    """Run two syncs with changed weights on every rank; return the wrong tensors and the statistics."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sources = make_sources(grid)
    context = SyncContext(
        rank=rank,
        sources=sources,
        topology=even_nodes(grid.size, 1),
        senders=senders,
        model_replicas=model_replicas(grid),
    )
    strategy = GatherHf(context, 4000)
    wrong, all_stats = [], []
    for sync in range(2):
        held = {p.local: value(p.tensor, sync)[slices(p.box)].clone() for p in sources[rank].pieces}
        sink = Sink()
        all_stats.append(strategy.push(held, Sinks(full_tensors=(sink,)) if rank in senders else Sinks()))
        if rank in senders:
            wrong += [name for name in TENSORS if not torch.equal(sink.tensors[name], value(name, sync))]
    strategy.close()
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
    case = Scenario(
        model="odd sizes",
        grid=grid,
        gen_pp=1,
        gen_tp=1,
        sources=tuple(make_sources(grid)),
        engine=((make_sources(RankGrid())[0],),),
        topology=even_nodes(grid.size, 1),
        bucket_bytes=4000,
    )
    planned = forecast(replace(arrange("gather_hf", case), senders=tuple(senders)), case).stats
    for rank, (wrong, all_stats) in enumerate(run_ranks(push_on_rank, grid.size, tmp_path, grid, senders)):
        assert wrong == []
        assert all_stats == [planned[rank]] * 2
        # the largest tensor, which has a bucket of its own, takes up to 3 * 2720 bytes with its padding
        assert all_stats[0].peak_extra_bytes <= 2 * max(mmap.PAGESIZE, 8192) + 3 * 2720


def count_waits_on_rank(grid: RankGrid, bucket_bytes: int):
    """Return the number of buckets, and of the times that this rank waited for others in one push."""
    import torch.distributed as dist

    from megarl.reshard.strategies import gather_hf

    dist.init_process_group("gloo")
    strategy, held = make_strategy_on_rank(grid, bucket_bytes, timeout_seconds=None)
    waits = []

    def wait_for(messages, deadline):
        waits.append(len(messages))
        transport.wait_for(messages, deadline)

    gather_hf.wait_for = wait_for
    strategy.push(held, Sinks())
    strategy.close()
    return gather_results((len(strategy._plans), waits))


def gather_results(mine):
    """Return the results of all ranks, by rank."""
    import torch.distributed as dist

    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    dist.destroy_process_group()
    return out


def make_strategy_on_rank(grid: RankGrid, bucket_bytes: int, timeout_seconds):
    """Return the strategy of this rank, with rank 0 as the only sender, and the tensors that the rank holds."""
    import torch.distributed as dist

    rank, sources = dist.get_rank(), make_sources(grid)
    context = SyncContext(
        rank=rank,
        sources=sources,
        topology=even_nodes(grid.size, 1),
        senders=[0],
        model_replicas=model_replicas(grid),
    )
    held = {p.local: value(p.tensor, 0)[slices(p.box)].clone() for p in sources[rank].pieces}
    return GatherHf(context, bucket_bytes, timeout_seconds=timeout_seconds), held


def test_all_tensors_of_a_bucket_are_gathered_together(tmp_path):
    """A rank waits once for the all-gathers and once for the broadcasts of a bucket, however many tensors it has."""
    for num_buckets, waits in run_ranks(count_waits_on_rank, 4, tmp_path, RankGrid(tp=2, pp=2), 10**9):
        assert num_buckets == 1
        assert len(waits) == 2
        assert waits[1] == len(TENSORS)


STALLED, TIMEOUT_SECONDS = 1, 2.0


def push_with_stalled_rank(grid: RankGrid):
    """Push without rank `STALLED`; return the error of each rank and the seconds until it was raised."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    strategy, held = make_strategy_on_rank(grid, 10**9, TIMEOUT_SECONDS)
    if dist.get_rank() == STALLED:
        time.sleep(3 * TIMEOUT_SECONDS)
        return gather_results((None, 0.0))
    started = time.monotonic()
    with pytest.raises(WeightSyncError) as error:
        strategy.push(held, Sinks())
    seconds = time.monotonic() - started
    strategy.close()
    return gather_results((str(error.value), seconds))


def test_push_ends_at_its_deadline(tmp_path):
    grid = RankGrid(tp=2, pp=2)
    for rank, (error, seconds) in enumerate(run_ranks(push_with_stalled_rank, grid.size, tmp_path, grid)):
        if rank != STALLED:
            assert error is not None
            assert error.startswith(f"rank {rank}: full tensors: "), error
            assert seconds < HANG_SECONDS
        if rank == 0:
            assert "nothing from rank 1 within 2 s" in error


def record_on_rank(grid: RankGrid, bucket_bytes: int):
    """Push on every rank, rank 0 delivers; return what each rank did: groups of collectives, and waits for all so far.

    A group of collectives is (kind of collective, name and ranks of the process group, sizes in bytes).
    """
    import torch.distributed as dist

    from megarl.reshard.strategies import gather_hf

    dist.init_process_group("gloo")
    strategy, held = make_strategy_on_rank(grid, bucket_bytes, timeout_seconds=None)
    events = []

    def wait_for(messages, deadline):
        events.append("wait")
        transport.wait_for(messages, deadline)

    def identify(group):
        return group.group_name, tuple(dist.get_process_group_ranks(group))

    class Recorder(ByteCounter):
        def start_all_gathers(self, gathers, group):
            sizes = tuple(out.nbytes for out, _ in gathers)
            events.append(("all_gather", identify(group), sizes))
            return super().start_all_gathers(gathers, group)

        def start_broadcasts(self, broadcasts, group):
            sizes = tuple((tensor.nbytes, source) for tensor, source in broadcasts)
            if sizes:
                events.append(("broadcast", identify(group), sizes))
            return super().start_broadcasts(broadcasts, group)

    gather_hf.wait_for, gather_hf.ByteCounter = wait_for, Recorder
    strategy.push(held, Sinks())
    strategy.close()
    return gather_results(events)


def run_in_nccl_order(by_rank):
    """Replay the events of all ranks by NCCL's rules; return the ranks that never end.

    Each process group is a communicator with a stream on every rank. A group of collectives is one kernel: it runs once
    it is the first that has not ended on the streams of all members. A rank that waits posts nothing.
    """
    posted = [{} for _ in by_rank]  # communicator -> groups of collectives, in order
    ended = Counter()  # groups that have ended, by communicator
    at, is_moving = [0] * len(by_rank), True
    while is_moving:
        is_moving = False
        for rank, events in enumerate(by_rank):
            while at[rank] < len(events):
                event = events[at[rank]]
                if event == "wait":
                    if any(len(stream) > ended[c] for c, stream in posted[rank].items()):
                        break
                else:
                    posted[rank].setdefault(event[1], []).append(event)
                at[rank], is_moving = at[rank] + 1, True
        for communicator in {each for streams in posted for each in streams}:
            streams = [posted[member].get(communicator, []) for member in communicator[1]]
            while all(len(stream) > ended[communicator] for stream in streams):
                calls = {stream[ended[communicator]] for stream in streams}
                assert len(calls) == 1, "members call different collectives"
                ended[communicator] += 1
                is_moving = True
    return [rank for rank, events in enumerate(by_rank) if at[rank] < len(events)]


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "ep": 2, "etp": 1}], ids=str)
def test_collectives_progress_by_the_rules_of_nccl(sizes, tmp_path):
    grid = RankGrid(**sizes)
    by_rank = run_ranks(record_on_rank, grid.size, tmp_path, grid, 4000)
    assert all(events for events in by_rank[:2])
    assert run_in_nccl_order(by_rank) == []
    # a rank that leaves the last group of collectives out stops others
    missing = max(i for i, event in enumerate(by_rank[1]) if event != "wait")
    assert run_in_nccl_order([by_rank[0], by_rank[1][:missing], *by_rank[2:]]) != []
