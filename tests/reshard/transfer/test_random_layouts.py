"""Random layouts, moved in full and as deltas between threads, over plain gloo and over gloo in NCCL's order."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reshard.nccl_order import NcclOrderTransport
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning import rounds as round_planning
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.bucket import Parameters
from megarl.reshard.transfer.delta_sync import RankSync
from megarl.reshard.transfer.element_code import code_form
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.transport import Transport
from tests.reshard.rank_process import empty_parameters, held_tensors, wrong_elements
from tests.time_limits import UNREACHED_SECONDS

COLUMNS = 8
BUCKET_BYTES = 12_288
TRANSPORTS = {
    "gloo": lambda group: Transport(group, timeout_seconds=UNREACHED_SECONDS, is_exclusive=True, coalesces=False),
    "nccl order": lambda group: NcclOrderTransport(group, timeout_seconds=UNREACHED_SECONDS, is_connected=True),
}


def value(name):
    rows = int(name.split(".")[1])
    return torch.rand(rows, COLUMNS, generator=torch.Generator().manual_seed(len(name) * rows))


def split_rows(rows, owners, engines, world):
    """Return sources and needs: the ranks `owners[i]` divide the rows of tensor i, each of `engines` those of all."""
    specs = {f"t{i}.{n}": TensorSpec((n, COLUMNS), "float32") for i, n in enumerate(rows)}

    def split(groups_by_tensor, prefix):
        pieces = [[] for _ in range(world)]
        for name, num_rows, groups in zip(specs, rows, groups_by_tensor, strict=True):
            for ranks in groups:
                cuts = [num_rows * part // len(ranks) for part in range(len(ranks) + 1)]
                for rank, first, last in zip(ranks, cuts[:-1], cuts[1:], strict=True):
                    box, local = ((first, last), (0, COLUMNS)), ((0, last - first), (0, COLUMNS))
                    pieces[rank] += [ShardPiece(name, box, f"{prefix}.{name}", local)] * (first < last)
        return [WeightLayout(specs, tuple(of_rank)) for of_rank in pieces]

    return split([[ranks] for ranks in owners], "train"), dict(enumerate(split([engines] * len(rows), "gen")))


@st.composite
def layouts(draw):
    """Draw a trainer whose tensors are divided among some of the ranks, engines of some tp, and nodes."""
    world = draw(st.integers(2, 4))
    rows = draw(st.lists(st.integers(1, 40) | st.integers(500, 4000), min_size=1, max_size=4))
    some = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    owners = [draw(st.permutations(range(world)) | some) for _ in rows]
    tp = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    engines = [list(range(first, first + tp)) for first in range(0, world, tp)]
    nodes_of_rank = [(0,) * world, tuple(rank * 2 // world for rank in range(world)), tuple(range(world))]
    return *split_rows(rows, owners, engines, world), draw(st.sampled_from(nodes_of_rank))


def connect(transport, size):
    """Return a transport for each rank, between threads of this process."""
    store, never = dist.HashStore(), timedelta(seconds=UNREACHED_SECONDS)
    with ThreadPoolExecutor(size) as pool:
        groups = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, size, never), range(size))
        return [TRANSPORTS[transport](group) for group in groups]


@dataclass
class Cluster:
    """Ranks in threads, that hold parts of a model and need parts of it."""

    transport: str
    sources: list
    needs: dict
    nodes: tuple

    def __post_init__(self):
        self.world = len(self.sources)
        self.weights = {name: value(name) for name in self.sources[0].tensors}
        self.targets = [empty_parameters(self.needs[rank]) for rank in range(self.world)]
        self.plans = [
            cached_plan(self.sources, self.needs, Topology(self.nodes), rank, BUCKET_BYTES)
            for rank in range(self.world)
        ]
        self.deltas = []
        self.pool = ThreadPoolExecutor(self.world)
        self.connections = connect(self.transport, self.world)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for connection in self.connections:
            connection.close()
        self.pool.shutdown()

    def sync(self, update=None):
        """Run a delta sync, or one without `update`; return by rank its statistics, or its error."""

        def run(rank):
            held, sink = held_tensors(self.sources[rank], self.value, 0), Parameters(self.targets[rank])
            plan, connection = self.plans[rank], self.connections[rank]
            try:
                if update is None:
                    return BoxExecutor(rank, plan.rounds, plan.buffer_sizes, transport=connection).run(held, sink)
                return self.deltas[rank].run(held, sink, update, connection)
            except WeightSyncError as error:
                return str(error)

        return list(self.pool.map(run, range(self.world)))

    def wrong_elements(self):
        return sum(wrong_elements(need, self.targets[rank], self.value, 0) for rank, need in self.needs.items())

    def value(self, tensor, _):
        return self.weights[tensor]

    def messages(self):
        """Yield (source, destination, hop), tensor and rows of every box of the plan, from its rounds."""
        for rank, plan in enumerate(self.plans):
            piece_of = {piece.local: piece for piece in self.needs[rank].pieces}
            for this in plan.rounds:
                for number, message in ((number, m) for number, hop in enumerate(this.hops) for m in hop.receives):
                    for slot in message.slots:
                        piece = piece_of[slot.local]
                        first = piece.box[0][0] - piece.local_box[0][0]
                        (start, stop), _ = slot.local_box
                        yield (message.source, rank, number), piece.tensor, start + first, stop + first


def check_sync(transport, sources, needs, nodes):
    with Cluster(transport, sources, needs, nodes) as cluster:
        assert not [outcome for outcome in cluster.sync() if isinstance(outcome, str)]
        assert cluster.wrong_elements() == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=15)
@given(layouts())
def test_random_layouts_arrive(transport, drawn):
    check_sync(transport, *drawn)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_tensor_that_every_rank_needs_from_every_rank(transport):
    """Each rank packs more for the others than its staging holds."""
    layouts_of_ranks = split_rows([4096, 32], [range(4)] * 2, [[rank] for rank in range(4)], 4)
    check_sync(transport, *layouts_of_ranks, (0,) * 4)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_boxes_pass_several_nodes(transport):
    """One rank holds what six ranks on nodes of their own need: they forward it to each other, in three hops."""
    nodes, sizes = tuple(range(7)), [2000, 700, 3, 40, 900]
    sources, needs = split_rows(sizes, [[0]] * 5, [[rank] for rank in range(1, 7)], 7)
    plans = [cached_plan(sources, needs, Topology(nodes), rank, BUCKET_BYTES) for rank in range(7)]
    assert {len(plan.rounds[0].hops) for plan in plans} == {3}
    sent = sum(hop.bytes_sent for this in plans[0].rounds for hop in this.hops)
    assert sent == sum(sizes) * COLUMNS * 4  # once, instead of six times
    check_sync(transport, sources, needs, nodes)


LARGE_BYTES = 1024
"""Small boxes share a message, large ones have one of their own."""

UNLIMITED_BYTES = 1 << 30
"""Of buckets, so that codes are packed however large they are."""

COUNT_BYTES = 8
"""Of the number of changed elements of a box."""


@contextmanager
def delta_cluster(*arguments, bucket_bytes=BUCKET_BYTES):
    """Make a cluster for delta syncs with small and large messages; `bucket_bytes`: limit of packed codes."""
    with patch.object(round_planning, "LARGE_MESSAGE_BYTES", LARGE_BYTES), Cluster(*arguments) as cluster:
        cluster.deltas = [RankSync(rank, plan, bucket_bytes) for rank, plan in enumerate(cluster.plans)]
        yield cluster


def changed_bytes(cluster, before):
    """Return the bytes of the codes that have to travel, from a comparison of all elements, and those of counts."""
    total = count_bytes = 0
    for _, tensor, start, stop in cluster.messages():
        changed = int((bits(before[tensor]) != bits(cluster.weights[tensor]))[start:stop].sum())
        total += code_form((stop - start) * COLUMNS, 4, changed).num_bytes
        count_bytes += COUNT_BYTES
    return total, count_bytes


def bits(tensor):
    return tensor.view(torch.int32)


@st.composite
def updates(draw, weights):
    """Draw the elements of each tensor that change, as a mask."""
    masks = {}
    for name, tensor in weights.items():
        share = draw(st.sampled_from([0.0, 1e-3, 0.02, 0.3, 1.0]))
        seed = draw(st.integers(0, 2**32 - 1))
        masks[name] = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share
    return masks


def change(weights, masks):
    before = {name: tensor.clone() for name, tensor in weights.items()}
    for name, mask in masks.items():
        weights[name][mask] += 1.0
    return before


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=12)
@given(drawn=layouts(), data=st.data())
def test_changed_elements_travel_and_nothing_else(transport, drawn, data):
    """After a full sync, two sparse ones: engines hold all weights, and counted bytes are those of the codes."""
    limit = data.draw(st.sampled_from([BUCKET_BYTES, UNLIMITED_BYTES]))
    with delta_cluster(transport, *drawn, bucket_bytes=limit) as cluster:
        whole = cluster.sync(DeltaUpdate(number=0))
        assert cluster.wrong_elements() == 0
        whole_bytes = sum(stats.bytes_received for stats in whole)
        assert sum(stats.count_bytes + stats.bytes_not_received for stats in whole) == 0
        for number in (1, 2):
            before = change(cluster.weights, data.draw(updates(cluster.weights)))
            stats = cluster.sync(DeltaUpdate(number=number, base=number - 1))
            assert cluster.wrong_elements() == 0
            wanted, count_bytes = changed_bytes(cluster, before)
            assert sum(each.count_bytes for each in stats) == count_bytes
            received = sum(each.bytes_received for each in stats)
            assert received == sum(each.bytes_sent for each in stats)
            sent = received - count_bytes
            assert sent == wanted if limit == UNLIMITED_BYTES else wanted <= sent <= whole_bytes
            assert sum(each.bytes_not_received for each in stats) == whole_bytes - sent
            before_of_rank = [each.bytes_delivered for each in whole]
            assert [each.bytes_delivered + each.bytes_not_delivered for each in stats] == before_of_rank
            for rank, (each, full) in enumerate(zip(stats, whole, strict=True)):
                held = sum(held.num_bytes for held in cluster.deltas[rank].plan.held)
                assert held <= each.copied_bytes <= 1.5 * held
                assert each.peak_extra_bytes <= max(2.25 * limit, 4 * mmap.PAGESIZE)
                assert full.copied_bytes == held


def test_a_rank_without_copies_of_the_base_fails_the_sync_for_all():
    sources, needs = split_rows([64], [[0, 1]], [[1, 0]], 2)
    with delta_cluster("gloo", sources, needs, (0, 0)) as cluster:
        cluster.sync(DeltaUpdate(number=0))
        cluster.deltas[1] = RankSync(1, cluster.plans[1], BUCKET_BYTES)  # of a process that was replaced
        first, second = cluster.sync(DeltaUpdate(number=1, base=0))
        assert second == "rank 1 has no copies of the weights of sync 0"
        assert first.startswith("rank 0: numbers of changed weights: lost the connection to rank 1")
    with delta_cluster("gloo", sources, needs, (0, 0)) as again:  # the copies are invalid since the sync has failed
        again.deltas = cluster.deltas
        assert again.sync(DeltaUpdate(number=2, base=0))[0] == "rank 0 has no copies of the weights of sync 0"


def test_signs_and_nan_count_as_changes():
    """Bits are compared: 0.0 and -0.0 are equal, NaN and NaN are not."""
    with delta_cluster("gloo", *split_rows([4], [[0]], [[1]], 2), (0, 0)) as cluster:
        cluster.weights["t0.4"] = torch.zeros(4, COLUMNS)
        cluster.sync(DeltaUpdate(number=0))
        for number, content, changed in ((1, -0.0, 4 * COLUMNS), (2, torch.nan, 4 * COLUMNS), (3, torch.nan, 0)):
            cluster.weights["t0.4"].fill_(content)
            stats = cluster.sync(DeltaUpdate(number=number, base=number - 1))
            assert [each.changed_elements for each in stats] == [changed, 0]
            got = cluster.targets[1]["gen.t0.4"].view(torch.int32)
            assert torch.equal(got, cluster.weights["t0.4"].view(torch.int32))
