"""Delta syncs over random layouts, between threads: what arrives, and what travels."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import TensorSpec
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning import delta as delta_planning
from megarl.reshard.planning import rounds as round_planning
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.delta_sync import DeltaSync
from megarl.reshard.transfer.sink import Parameters
from tests.reshard.rank_process import empty_parameters, held_tensors, wrong_elements
from tests.reshard.transfer.test_random_layouts import (
    BUCKET_BYTES,
    COLUMNS,
    TRANSPORTS,
    connect,
    layouts,
    split_rows,
    value,
)

ROW_BYTES = COLUMNS * 4
PIECE_BYTES = 2048
LARGE_BYTES = 1024
"""Small boxes share a message, large ones have one for each run of changed pieces."""


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_planning, "PIECE_BYTES", PIECE_BYTES)
        patch.setattr(round_planning, "LARGE_MESSAGE_BYTES", LARGE_BYTES)
        yield


@dataclass
class Cluster:
    """Ranks in threads, that hold parts of a model and need parts of it."""

    transport: str
    sources: list
    needs: dict
    nodes: tuple

    def __post_init__(self):
        self.world = len(self.sources)
        self.weights = {name: value(name).clone() for name in self.sources[0].tensors}
        self.targets = [empty_parameters(self.needs[rank]) for rank in range(self.world)]
        self.plans = [
            cached_plan(self.sources, self.needs, Topology(self.nodes), rank, BUCKET_BYTES)
            for rank in range(self.world)
        ]
        self.deltas = [DeltaSync(rank, plan.rounds) for rank, plan in enumerate(self.plans)]
        self.pool = ThreadPoolExecutor(self.world)
        self.connections = connect(self.transport, self.world)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for connection in self.connections:
            connection.close()
        self.pool.shutdown()

    def sync(self, update):
        """Run a sync; return by rank its statistics, or its error."""

        def run(rank):
            held, sink = held_tensors(self.sources[rank], self.value, 0), Parameters(self.targets[rank])
            try:
                return self.deltas[rank].run(held, sink, update, self.connections[rank])
            except WeightSyncError as error:
                return str(error)

        return list(self.pool.map(run, range(self.world)))

    def wrong_elements(self):
        return sum(wrong_elements(need, self.targets[rank], self.value, 0) for rank, need in self.needs.items())

    def value(self, tensor, _):
        return self.weights[tensor]

    def messages(self):
        """Yield (source, destination, hop), tensor and rows of every box of the plan, without the selection's code."""
        for rank, plan in enumerate(self.plans):
            tensor_of = {}
            for p in self.needs[rank].pieces:
                tensor_of.setdefault(p.local, []).append(p)
            for this in plan.rounds:
                for number, message in ((number, m) for number, hop in enumerate(this.hops) for m in hop.receives):
                    for slot in message.slots:
                        (piece,) = tensor_of[slot.local]
                        first = piece.box[0][0] - piece.local_box[0][0]
                        (start, stop), _ = slot.local_box
                        yield (message.source, rank, number), piece.tensor, start + first, stop + first


def changed_bytes(cluster, before):
    """Return the bytes of changed pieces that have to travel, by brute force, and those of their marks."""
    total, marks = 0, {}
    for ends, tensor, start, stop in cluster.messages():
        is_changed = (before[tensor] != cluster.weights[tensor]).any(dim=1).tolist()
        rows = max(1, PIECE_BYTES // ROW_BYTES)
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            total += (last - first) * ROW_BYTES * any(is_changed[first:last])
            marks[ends] = marks.get(ends, 0) + 1
    return total, sum(-(-count // 8) for count in marks.values())


@st.composite
def updates(draw, weights):
    """Draw rows of some tensors that change."""
    changed = {}
    for name, tensor in weights.items():
        rows = len(tensor)
        kind = draw(st.sampled_from(["none", "some", "all"]))
        if kind == "some":
            changed[name] = sorted(draw(st.sets(st.integers(0, rows - 1), min_size=1, max_size=6)))
        elif kind == "all":
            changed[name] = list(range(rows))
    return changed


def change(weights, rows_of):
    before = {name: tensor.clone() for name, tensor in weights.items()}
    for name, rows in rows_of.items():
        weights[name][rows, 0] += 1.0
    return before


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=12)
@given(drawn=layouts(), data=st.data())
def test_changed_pieces_travel_and_nothing_else(transport, drawn, data):
    """After a whole sync, two sparse ones: engines hold all weights, and counted bytes are those of changed pieces."""
    with Cluster(transport, *drawn) as cluster:
        whole = cluster.sync(DeltaUpdate(number=0))
        assert cluster.wrong_elements() == 0
        whole_bytes = sum(stats.bytes_received for stats in whole)
        assert sum(stats.mark_bytes + stats.bytes_not_received for stats in whole) == 0
        for number in (1, 2):
            before = change(cluster.weights, data.draw(updates(cluster.weights)))
            stats = cluster.sync(DeltaUpdate(number=number, base=number - 1))
            assert cluster.wrong_elements() == 0
            wanted, mark_bytes = changed_bytes(cluster, before)
            assert sum(each.mark_bytes for each in stats) == mark_bytes
            received = sum(each.bytes_received for each in stats)
            assert received == sum(each.bytes_sent for each in stats)
            assert received - mark_bytes == wanted
            assert sum(each.bytes_not_received for each in stats) == whole_bytes - wanted
            before_of_rank = [each.bytes_delivered for each in whole]
            assert [each.bytes_delivered + each.bytes_not_delivered for each in stats] == before_of_rank
            assert all(each.peak_extra_bytes <= max(2 * BUCKET_BYTES, 4 * mmap.PAGESIZE) for each in stats)


def test_a_rank_without_digests_of_the_base_fails_the_sync_for_all():
    specs = {"t0.64": TensorSpec((64, COLUMNS), "float32")}
    sources = split_rows(specs, {"t0.64": [[0, 1]]}, 2, "train")
    needs = dict(enumerate(split_rows(specs, {"t0.64": [[1, 0]]}, 2, "gen")))
    with Cluster("gloo", sources, needs, (0, 0)) as cluster:
        cluster.sync(DeltaUpdate(number=0))
        cluster.deltas[1] = DeltaSync(1, cluster.plans[1].rounds)  # of a process that was replaced
        first, second = cluster.sync(DeltaUpdate(number=1, base=0))
        assert second == "rank 1 has no digests of sync 0"
        assert first.startswith("rank 0: marks of changed weights: lost the connection to rank 1")
    with Cluster("gloo", sources, needs, (0, 0)) as again:  # the digests of the base were dropped with the failed sync
        again.deltas = cluster.deltas
        assert again.sync(DeltaUpdate(number=2, base=0))[0] == "rank 0 has no digests of sync 0"


def test_signs_and_nan_count_as_changes():
    """Bits are compared: 0.0 and -0.0 are equal, NaN and NaN are not."""
    specs = {"t0.4": TensorSpec((4, COLUMNS), "float32")}
    sources = split_rows(specs, {"t0.4": [[0]]}, 2, "train")
    needs = dict(enumerate(split_rows(specs, {"t0.4": [[1]]}, 2, "gen")))
    with Cluster("gloo", sources, needs, (0, 0)) as cluster:
        cluster.weights["t0.4"] = torch.zeros(4, COLUMNS)
        cluster.sync(DeltaUpdate(number=0))
        for number, content, changed in ((1, -0.0, 1), (2, torch.nan, 1), (3, torch.nan, 0)):
            cluster.weights["t0.4"].fill_(content)
            stats = cluster.sync(DeltaUpdate(number=number, base=number - 1))
            assert [each.changed_pieces for each in stats] == [changed, 0]
            got = cluster.targets[1]["gen.t0.4"].view(torch.int32)
            assert torch.equal(got, cluster.weights["t0.4"].view(torch.int32))
