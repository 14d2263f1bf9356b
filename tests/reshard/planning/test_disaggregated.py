"""Disaggregated sync between real processes on gloo that share only a store, with injected faults."""

import pickle
import re
import signal
from collections import Counter
from dataclasses import replace

import pytest

from megarl.errors import WeightSyncError
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.micro_dp import GenerationPlace
from megarl.reshard.planning.disaggregated import TransferRank, TransferSpec
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.process_groups import NCCL_ORDER, TransferGroup, connect_group
from megarl.reshard.transfer.sink import Parameters
from megarl.reshard.transfer.sync_store import open_store
from megarl.reshard.transfer.transport import Transport
from tests.reshard import synthetic
from tests.reshard.rank_process import RankProcess, TransferMember, call
from tests.reshard.transfer.test_executor import value
from tests.time_limits import HANG_SECONDS

BUCKET_BYTES = 16_384
TIMEOUT = 6.0
SLACK = 30.0
"""Extra seconds that a process on a busy machine may take to notice a failure."""

SENDERS, RECEIVERS = (0, 1), (2, 3)
NO_STATS = SyncStats(bytes_sent=0, bytes_received=0, bytes_delivered=0, buckets=0, peak_extra_bytes=0)


def arrangement(nodes=(0, 0, 1, 1), bucket_bytes=BUCKET_BYTES):
    """Return a spec with trainer ranks that split the model and two engines that need all of it."""
    return TransferSpec(
        sources=synthetic.trainers(RankGrid(tp=len(nodes) - 2)),
        needs=tuple(synthetic.needs([GenerationPlace(0, 0, 0)], 1, 1).values()),
        num_engines=2,
        nodes=nodes,
        bucket_bytes=bucket_bytes,
    )


class Ranks:
    """Processes of all ranks, and the store through which they connect."""

    def __init__(self, transfer_spec, backend="gloo", timeout_seconds=TIMEOUT, abort_seconds=10.0):
        self.transfer_spec, self.backend = transfer_spec, backend
        self._timeout_seconds, self._abort_seconds = timeout_seconds, abort_seconds
        self.store = open_store("127.0.0.1")
        self.ranks = [self.start(rank) for rank in range(self.transfer_spec.size)]
        self.num_connects = 0
        for rank in self.ranks:
            rank.wait_started()

    def start(self, rank):
        return RankProcess(TransferMember, rank, self.transfer_spec, value)

    def replace(self, rank):
        self.ranks[rank].close()
        self.ranks[rank] = self.start(rank)
        self.ranks[rank].wait_started()

    def connect_all(self):
        self.num_connects += 1
        group = TransferGroup(
            host="127.0.0.1",
            port=self.store.port,
            name=f"group {self.num_connects}",
            size=self.transfer_spec.size,
            timeout_seconds=self._timeout_seconds,
            backend=self.backend,
            abort_seconds=self._abort_seconds,
        )
        self.heartbeat = group.heartbeat
        call(self.ranks, "connect", group)

    def sync(self, number, fault=None, delta=None):
        return call(self.ranks, "sync", number, fault, delta)

    def failing_sync(self, number, fault, delta=None):
        """Run a sync with a fault; return the outcomes of the other ranks, by rank."""
        for rank in self.ranks:
            rank.begin("sync", number, fault, delta)
        return {rank.rank: rank.result() for rank in self.ranks if rank.rank != fault[1]}

    def close(self):
        for rank in self.ranks:
            rank.close()


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(arrangement())
    ranks.connect_all()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def ordered_ranks():
    """The same ranks over gloo in NCCL's order."""
    ranks = Ranks(arrangement(), NCCL_ORDER)
    ranks.connect_all()
    yield ranks
    ranks.close()


@pytest.fixture(params=["gloo", NCCL_ORDER])
def sound_ranks(request):
    """Ranks without a fault, over either transport."""
    return request.getfixturevalue("ranks" if request.param == "gloo" else "ordered_ranks")


def test_three_syncs_are_bitwise_exact_and_match_planned_counts(sound_ranks):
    ranks = sound_ranks
    for number in range(3):
        results = ranks.sync(number)
        assert [mismatched for _, mismatched in results] == [0] * 4
        for rank, (stats, _) in enumerate(results):
            receives = rank in RECEIVERS
            planned = ranks.transfer_spec.plan(rank).rounds
            assert stats.bytes_received == receives * synthetic.MODEL_BYTES
            assert stats.bytes_delivered == sum(r.bytes_delivered for r in planned) == stats.bytes_received
            assert stats.bytes_sent == sum(hop.bytes_sent for r in planned for hop in r.hops)
            # each byte enters the engines' node once, and each engine relays half of it
            assert stats.bytes_sent == synthetic.MODEL_BYTES / 2
            assert stats.peak_extra_bytes <= 2 * BUCKET_BYTES
            assert stats.buckets == (len(planned) if receives else 0)


def test_full_tensors_are_sent_within_bounded_memory(sound_ranks):
    ranks = sound_ranks
    whole = ("layers.3", "layers.4", *(f"layers.{i}" for i in range(30, 40)))
    transfer_spec = replace(ranks.transfer_spec, full_tensors=whole)
    assert [len(part.tensors) for part in transfer_spec.plan_full_tensors(0)] == [5, 5, 2]
    call(ranks.ranks, "prepare", transfer_spec)
    ranks.connect_all()
    try:
        for number in (20, 21):
            results = ranks.sync(number)
            assert [mismatched for _, mismatched in results] == [0] * 4
            for rank, (stats, _) in enumerate(results):
                assert stats.bytes_received == (rank in RECEIVERS) * synthetic.MODEL_BYTES
                assert stats.bytes_sent == synthetic.MODEL_BYTES / 2
                assert stats.peak_extra_bytes <= 2 * BUCKET_BYTES
    finally:
        call(ranks.ranks, "prepare", ranks.transfer_spec)
        ranks.connect_all()


def test_all_tensors_may_be_sent_in_full(monkeypatch):
    """No box is received then, so that the engine rank has no parameters to receive into."""
    whole = tuple(synthetic.TENSORS)
    rank = TransferRank(replace(arrangement(nodes=(0, 1, 1)), full_tensors=whole), 1)
    monkeypatch.setattr(rank, "_transport", Transport())
    monkeypatch.setattr(rank, "_execute", lambda *_: NO_STATS)
    loaded = []
    rank.run({}, Parameters({}), loaded.append)
    assert {name: tuple(tensor.shape) for part in loaded for name, tensor in part.items()} == {
        name: spec.shape for name, spec in synthetic.TENSORS.items()
    }


@pytest.mark.parametrize("whole", [(), ("layers.1", "layers.40")])
def test_each_missing_byte_enters_a_node_once(whole):
    """Three engines of two TP ranks: one on a node, two on another one, none on the trainer's nodes."""
    nodes = (0, 0, 1, 1, 2, 2, 3, 3, 3, 3)
    transfer_spec = TransferSpec(
        sources=synthetic.trainers(RankGrid(tp=2, dp=2)),
        needs=tuple(synthetic.needs([GenerationPlace(0, 0, tp) for tp in range(2)], 1, 2).values()),
        num_engines=3,
        nodes=nodes,
        bucket_bytes=BUCKET_BYTES,
        full_tensors=whole,
    )
    entering, sent, received = Counter(), 0, 0
    for rank in range(transfer_spec.size):
        for plan in (transfer_spec.plan(rank), *(part.rounds for part in transfer_spec.plan_full_tensors(rank))):
            for hop in (hop for each in plan.rounds for hop in each.hops):
                sent += hop.bytes_sent
                received += sum(message.num_bytes for message in hop.receives)
                for message in hop.receives:
                    entering[nodes[rank]] += message.num_bytes * (nodes[message.source] != nodes[rank])
    assert entering == {2: synthetic.MODEL_BYTES, 3: synthetic.MODEL_BYTES}
    # TP ranks hold halves, and full tensors are sent to both of them
    twice = len(whole) * synthetic.MODEL_BYTES // synthetic.LAYERS
    assert sent == received == 3 * (synthetic.MODEL_BYTES + twice)


@pytest.mark.parametrize("backend", ["gloo", NCCL_ORDER])
def test_relayed_boxes_reach_a_slow_rank(backend):
    """With one tensor per round, relayed in one direction, the fast rank is a round ahead of the slow one."""
    ranks = Ranks(arrangement(nodes=(0, 1, 1), bucket_bytes=8192), backend, timeout_seconds=HANG_SECONDS)
    ranks.connect_all()
    for slow in (1, 2):
        assert [mismatched for _, mismatched in ranks.sync(slow, (0.01, slow))] == [0] * 3
    ranks.close()


def assert_errors_name_failed_rank(outcomes, failed):
    """All other ranks fail in time; at least one names the failed rank, others may name a peer that gave up."""
    for rank, outcome in outcomes.items():
        assert re.match(rf"rank {rank}: round [1-9]\d* of the weights: ", outcome.error), outcome.error
        assert outcome.seconds <= TIMEOUT + SLACK
        assert outcome.buffers == 0
    assert any(re.search(rf"ranks? (\d, )*{failed}\b", o.error.partition("weights: ")[2]) for o in outcomes.values())


def assert_next_sync_succeeds(ranks, number):
    ranks.connect_all()
    results = ranks.sync(number)
    assert [mismatched for _, mismatched in results] == [0] * 4
    assert [stats.bytes_received for stats, _ in results] == [0, 0, *[synthetic.MODEL_BYTES] * 2]


@pytest.mark.parametrize("stalled", [*SENDERS, *RECEIVERS])
def test_error_names_stalled_rank_and_next_sync_is_complete(ranks, stalled):
    outcomes = ranks.failing_sync(3, (signal.SIGSTOP, stalled))
    assert_errors_name_failed_rank(outcomes, stalled)
    ranks.ranks[stalled].signal(signal.SIGCONT)
    late = ranks.ranks[stalled].result()
    assert late.error.startswith(f"rank {stalled}: round ")
    assert late.buffers == 0
    for rank in ranks.ranks:
        rank.begin("sync", 4)
        assert rank.result().error.startswith(f"rank {rank.rank} has no connections to the other ranks")
    assert_next_sync_succeeds(ranks, 5)


@pytest.mark.parametrize("killed", [1, 2])
def test_error_names_dead_rank_and_replacement_connects(ranks, killed):
    outcomes = ranks.failing_sync(6, (signal.SIGKILL, killed))
    assert_errors_name_failed_rank(outcomes, killed)
    assert any(f"lost the connection to rank {killed} " in outcome.error for outcome in outcomes.values())
    assert all(outcome.seconds < TIMEOUT for outcome in outcomes.values())
    ranks.replace(killed)
    assert_next_sync_succeeds(ranks, 7)


def check_delta_sync(ranks, number, delta, changes):
    results = ranks.sync(number, delta=delta)
    assert [mismatched for _, mismatched in results] == [0] * 4
    received = [stats.bytes_received - stats.mark_bytes for stats, _ in results]
    assert received == [0, 0, *[synthetic.MODEL_BYTES if changes else 0] * 2]
    assert [stats.mark_bytes > 0 for stats, _ in results] == [False, False, *[delta.base is not None] * 2]


def test_all_weights_are_sent_after_a_rank_has_died_in_a_delta_sync(ranks):
    """The rank dies while it computes digests, before the others have its marks."""
    check_delta_sync(ranks, 8, DeltaUpdate(number=1), changes=True)
    check_delta_sync(ranks, 8, DeltaUpdate(number=2, base=1), changes=False)
    outcomes = ranks.failing_sync(9, (signal.SIGKILL, 1), DeltaUpdate(number=3, base=2))
    for rank in RECEIVERS:
        assert outcomes[rank].error.startswith(f"rank {rank}: marks of changed weights: lost the connection to rank ")
    assert outcomes[0].error.startswith("rank 0: ")
    ranks.replace(1)
    ranks.connect_all()
    outcomes = ranks.failing_sync(9, (None, 1), DeltaUpdate(number=4, base=2))
    assert outcomes[0].error == "rank 0 has no digests of sync 2"
    assert ranks.ranks[1].result().error == "rank 1 has no digests of sync 2"
    ranks.connect_all()
    check_delta_sync(ranks, 9, DeltaUpdate(number=5), changes=True)
    check_delta_sync(ranks, 10, DeltaUpdate(number=6, base=5), changes=True)


def test_connect_times_out_without_the_other_ranks():
    store = open_store("127.0.0.1")
    with pytest.raises(
        WeightSyncError, match=r"rank 0 of 2 could not connect to the other ranks at 127\.0\.0\.1:\d+ within 1 s"
    ):
        connect_group(TransferGroup("127.0.0.1", store.port, "alone", 2, 1.0), 0, "plan")


def test_connect_fails_if_store_is_closed():
    port = open_store("127.0.0.1").port
    with pytest.raises(
        WeightSyncError, match=rf"could not connect to the other ranks at 127\.0\.0\.1:{port} within 1 s"
    ):
        connect_group(TransferGroup("127.0.0.1", port, "nobody", 2, 1.0), 0, "plan")


def test_ranks_with_different_plans_do_not_connect():
    store, errors = open_store("127.0.0.1"), []
    transfer_group = TransferGroup("127.0.0.1", store.port, "two plans", 2, 1.0)
    for rank, bucket_bytes in enumerate((8192, 16_384)):
        with pytest.raises(WeightSyncError) as error:
            TransferRank(arrangement(bucket_bytes=bucket_bytes), rank).connect(transfer_group)
        errors.append(str(error.value))
    assert "rank 0 of 2 could not connect to the other ranks" in errors[0]
    assert errors[1] == "rank 1 of 2 has another plan than the rank that connected first"


def test_fingerprint_survives_pickling():
    transfer_spec = arrangement()
    assert pickle.loads(pickle.dumps(transfer_spec)).fingerprint() == transfer_spec.fingerprint()
    assert arrangement(nodes=(0, 0, 0, 0)).fingerprint() != transfer_spec.fingerprint()
    assert replace(transfer_spec, full_tensors=("layers.0",)).fingerprint() != transfer_spec.fingerprint()


def test_different_dtypes_are_rejected():
    transfer_spec = arrangement()
    half = {name: replace(spec, dtype="bfloat16") for name, spec in synthetic.TENSORS.items()}
    needs = tuple(WeightLayout(half, layout.pieces) for layout in transfer_spec.needs)
    with pytest.raises(WeightSyncError, match=r"layers\.0: the engines hold bfloat16, the trainer ranks float32"):
        replace(transfer_spec, needs=needs).plan(0)


def test_no_relay_on_a_single_node():
    transfer_spec = arrangement(nodes=(0, 0, 0, 0))
    hops = [hop for rank in range(4) for r in transfer_spec.plan(rank).rounds for hop in r.hops[1:]]
    assert not any(hop.sends or hop.receives for hop in hops)
    assert not TransferRank(transfer_spec, 0).is_connected
