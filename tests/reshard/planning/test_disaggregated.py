"""Disaggregated sync between real processes on gloo that share only a store, with injected faults."""

import pickle
import re
import signal
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.reshard.nccl_order import NcclOrderTransport
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import WeightNeeds
from megarl.reshard.planning.disaggregated import TransferRank, TransferSpec
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.commit_decision import open_store
from megarl.reshard.transfer.heartbeat import BUSY_LIMITS
from megarl.reshard.transfer.process_groups import TransferGroup, abort_connect, connect_group
from tests.reshard import synthetic
from tests.reshard.rank_process import ABORT, Ranks, TransferMember, call
from tests.reshard.transfer.test_executor import value
from tests.time_limits import HANG_SECONDS

BUCKET_BYTES = 16_384
RECEIVERS = (2, 3)


def arrangement(nodes=(0, 0, 1, 1), bucket_bytes=BUCKET_BYTES):
    """Return a spec with trainer ranks that split the model and two engines that need all of it."""
    return TransferSpec(
        sources=synthetic.trainers(RankGrid(tp=len(nodes) - 2)),
        needs=synthetic.engine(1),
        num_engines=2,
        nodes=nodes,
        bucket_bytes=bucket_bytes,
    )


SPEC = arrangement()


@pytest.fixture(scope="module", params=["gloo", NcclOrderTransport])
def ranks(request):
    """Two trainer ranks, 0 and 1, and two engine ranks on another node, 2 and 3, which relay to each other."""
    with Ranks(request.param, SPEC.size, TransferMember, SPEC, value) as ranks:
        yield ranks


def check_sync(ranks, number):
    """Run a sync; return the statistics by rank."""
    results = ranks.sync(number)
    assert [mismatched for _, mismatched in results] == [0] * 4
    for rank, (stats, _) in enumerate(results):
        assert stats.bytes_received == (rank in RECEIVERS) * synthetic.MODEL_BYTES
        # each byte enters the engines' node once, and each engine relays about half of it: slices end between rows
        slack = synthetic.MODEL_BYTES / 20 if rank in RECEIVERS else 0
        assert abs(stats.bytes_sent - synthetic.MODEL_BYTES / 2) <= slack
        assert stats.peak_extra_bytes <= 2 * BUCKET_BYTES
    assert sum(stats.bytes_sent for stats, _ in results) == 2 * synthetic.MODEL_BYTES
    return [stats for stats, _ in results]


def test_three_syncs_are_bitwise_exact_and_match_planned_counts(ranks):
    for number in range(3):
        for rank, stats in enumerate(check_sync(ranks, number)):
            planned = SPEC.plan(rank).rounds
            assert stats.bytes_delivered == sum(r.bytes_delivered for r in planned) == stats.bytes_received
            assert stats.bytes_sent == sum(hop.bytes_sent for r in planned for hop in r.hops)
            assert stats.buckets == (len(planned) if rank in RECEIVERS else 0)


@pytest.mark.parametrize("whole", [(), ("layers.1", "layers.40")])
def test_each_missing_byte_enters_a_node_once(whole):
    """Three engines of two TP ranks: one on a node, two on another one, none on the trainer's nodes."""
    nodes = (0, 0, 1, 1, 2, 2, 3, 3, 3, 3)
    needs = WeightNeeds(layouts=synthetic.engine(2), full_tensors=whole).received()
    sources = synthetic.trainers(RankGrid(tp=2, dp=2))
    transfer_spec = replace(arrangement(nodes), sources=sources, needs=needs, num_engines=3)
    entering, sent, received = Counter(), 0, 0
    for rank in range(transfer_spec.size):
        for hop in (hop for each in transfer_spec.plan(rank).rounds for hop in each.hops):
            sent += hop.bytes_sent
            received += sum(message.num_bytes for message in hop.receives)
            for message in hop.receives:
                entering[nodes[rank]] += message.num_bytes * (nodes[message.source] != nodes[rank])
    assert entering == {2: synthetic.MODEL_BYTES, 3: synthetic.MODEL_BYTES}
    # TP ranks hold halves, and full tensors are sent to both of them
    twice = len(whole) * synthetic.MODEL_BYTES // synthetic.LAYERS
    assert sent == received == 3 * (synthetic.MODEL_BYTES + twice)


@pytest.mark.parametrize("backend", ["gloo", NcclOrderTransport])
def test_relayed_boxes_reach_a_slow_rank(backend):
    """With one tensor per round, relayed in one direction, the fast rank is a round ahead of the slow one."""
    spec = arrangement(nodes=(0, 1, 1), bucket_bytes=8192)
    with Ranks(backend, spec.size, TransferMember, spec, value) as ranks:
        for slow in (1, 2):
            assert [mismatched for _, mismatched in ranks.sync(slow, (0.01, slow))] == [0] * 3


def check_failures(outcomes):
    """All ranks have failed in a round, without leaks; return what they say about it."""
    for rank, outcome in outcomes.items():
        assert re.match(rf"rank {rank}: round \d+ of the weights: ", outcome.error), outcome.error
        assert outcome.buffers == 0
    return [outcome.error.partition("weights: ")[2] for outcome in outcomes.values()]


def check_aborted(ranks, said, reason):
    """Over gloo, a rank may notice first that the connection to another one is lost."""
    aborted = [f"the sync was aborted: {reason}" in each for each in said]
    assert all(aborted) if ranks.backend == NcclOrderTransport else any(aborted), said


def kept(ranks):
    """Return the buffers that each rank keeps; none of them needs more than its plan."""
    by_rank = call(ranks.ranks, "memory")
    assert all(sum(buffers.values()) <= 2 * BUCKET_BYTES for buffers in by_rank)
    return by_rank


def test_buffers_are_kept_until_a_sync_fails(ranks):
    check_sync(ranks, 11)
    before = kept(ranks)
    assert all(sum(buffers.values()) > 0 for buffers in before)
    check_sync(ranks, 12)
    for number, base in ((1, None), (2, 1)):
        check_delta_sync(ranks, 13, DeltaUpdate(number=number, base=base), changes=base is None)
    check_sync(ranks, 14)
    assert kept(ranks) == before
    ranks.failing_sync(15, (WeightSyncError("no memory is left"), 1))
    assert ranks.ranks[1].result().error == "no memory is left"
    assert kept(ranks) == [{}] * 4
    check_next_sync(ranks)
    after = kept(ranks)
    check_sync(ranks, 16)
    assert kept(ranks) == after


def check_next_sync(ranks):
    """No rank sends or receives before all have connected again."""
    for rank in ranks.ranks:
        rank.begin("sync", 4)
        assert rank.result().error.startswith(f"rank {rank.rank} has no connections to the other ranks")
    ranks.connect_all()
    check_sync(ranks, 5)


@pytest.mark.parametrize(("late", "waiting"), [(0, 2), (3, 1)])
def test_a_rank_that_waits_until_the_deadline_names_the_late_one(ranks, late, waiting):
    others = {rank.rank: rank for rank in ranks.ranks if rank.rank != late}
    call([others[waiting]], "limit", 0.5)
    for rank in others.values():
        rank.begin("sync", 3)
    outcomes = {waiting: others[waiting].result()}
    ranks.ranks[late].begin("sync", 3)
    outcomes |= {number: rank.result() for number, rank in others.items() if number != waiting}
    said = check_failures(outcomes)[0]
    assert re.search(rf"ranks? (\d, )*{late}\b.* within 0\.5 s$", said), said
    assert ranks.ranks[late].result().error.startswith(f"rank {late}")
    check_next_sync(ranks)


@pytest.mark.parametrize("stalled", [0, 2])
def test_stalled_rank_aborts_the_sync_on_all_ranks(ranks, stalled):
    said = check_failures(ranks.monitored_sync(3, (signal.SIGSTOP, stalled)))
    check_aborted(ranks, said, f"rank {stalled} gave no sign of life for {ABORT:g} s")
    ranks.ranks[stalled].signal(signal.SIGCONT)
    assert check_failures({stalled: ranks.ranks[stalled].result()})
    check_next_sync(ranks)


@pytest.mark.parametrize("killed", [1, 3])
def test_error_names_dead_rank_and_replacement_connects(ranks, killed):
    """Over gloo, all ranks notice it by themselves."""
    fault = (signal.SIGKILL, killed)
    if ranks.backend == NcclOrderTransport:
        said = check_failures(ranks.monitored_sync(6, fault))
        check_aborted(ranks, said, f"rank {killed} gave no sign of life for {ABORT:g} s")
    else:
        said = check_failures(ranks.failing_sync(6, fault))
        assert any(f"lost the connection to rank {killed} " in each for each in said)
    ranks.replace(killed)
    ranks.connect_all()
    check_sync(ranks, 7)


def test_failed_rank_aborts_the_sync_on_all_ranks_at_once(ranks):
    said = check_failures(ranks.failing_sync(8, (WeightSyncError("no memory is left"), 1)))
    if ranks.backend == NcclOrderTransport:
        check_aborted(ranks, said, "no memory is left")
    assert ranks.ranks[1].result().error == "no memory is left"
    check_next_sync(ranks)


def test_rank_that_makes_no_progress_aborts_the_sync(ranks, tmp_path):
    """A trainer rank that lives, but packs nothing for a long time."""
    end = tmp_path / "end"
    said = check_failures(ranks.monitored_sync(10, (end, 0)))
    limit = BUSY_LIMITS * ABORT
    end.touch()
    said += [ranks.ranks[0].result().error]  # which lives, and may abort the sync first
    assert "the sync was aborted" in said[-1]
    check_aborted(ranks, said, f"no rank made progress for {limit:g} s: the others wait for rank 0")
    check_next_sync(ranks)


def check_delta_sync(ranks, number, delta, changes):
    results = ranks.sync(number, delta=delta)
    assert [mismatched for _, mismatched in results] == [0] * 4
    received = [stats.bytes_received - stats.count_bytes for stats, _ in results]
    assert received == [0, 0, *[synthetic.MODEL_BYTES if changes else 0] * 2]
    assert [stats.count_bytes > 0 for stats, _ in results] == [False, False, *[delta.base is not None] * 2]


@pytest.mark.parametrize("ranks", ["gloo"], indirect=True)
def test_all_weights_are_sent_after_a_rank_has_died_in_a_delta_sync(ranks):
    """The rank dies while it compares weights, before the others have its counts."""
    check_delta_sync(ranks, 8, DeltaUpdate(number=1), changes=True)
    check_delta_sync(ranks, 8, DeltaUpdate(number=2, base=1), changes=False)
    outcomes = ranks.failing_sync(9, (signal.SIGKILL, 1), DeltaUpdate(number=3, base=2))
    for rank in RECEIVERS:
        assert outcomes[rank].error.startswith(f"rank {rank}: numbers of changed weights: lost the connection to rank ")
    assert outcomes[0].error.startswith("rank 0: ")
    ranks.replace(1)
    ranks.connect_all()
    outcomes = ranks.failing_sync(9, (None, 1), DeltaUpdate(number=4, base=2))
    # its own error, or the one of a rank that was faster and aborted the sync
    why = (
        r"has no copies of the weights of sync 2|"
        r"has no connections .* \(the sync was aborted: rank \d has no copies of the weights of sync 2\): .*"
    )
    for rank, error in enumerate((outcomes[0].error, ranks.ranks[1].result().error)):
        assert re.fullmatch(f"rank {rank} ({why})", error), error
    ranks.connect_all()
    check_delta_sync(ranks, 9, DeltaUpdate(number=5), changes=True)
    check_delta_sync(ranks, 10, DeltaUpdate(number=6, base=5), changes=True)


@pytest.mark.parametrize("is_open", [True, False])
def test_connect_ends_at_its_timeout(is_open):
    store = open_store("127.0.0.1")
    group = TransferGroup("127.0.0.1", store.port, "alone", 2, timeout_seconds=0.5)
    store = store if is_open else None
    message = rf"rank 0 of 2 could not connect to the other ranks at 127\.0\.0\.1:{group.port} within 0\.5 s"
    with pytest.raises(WeightSyncError, match=message):
        connect_group(group, 0, "plan")


def test_ranks_with_different_plans_do_not_connect():
    store, errors = open_store("127.0.0.1"), []
    group = TransferGroup("127.0.0.1", store.port, "two plans", 2, timeout_seconds=HANG_SECONDS)
    abort_connect(group, store, "for a test")  # the first rank does not wait
    for rank, bucket_bytes in enumerate((8192, 16_384)):
        with pytest.raises(WeightSyncError) as error:
            TransferRank(arrangement(bucket_bytes=bucket_bytes), rank).connect(group)
        errors.append(str(error.value))
    plan = "rank 1 of 2 has another plan than the rank that connected first"
    assert errors == ["the connecting was aborted: for a test", plan]


def test_fingerprint_survives_pickling():
    transfer_spec = arrangement()
    assert pickle.loads(pickle.dumps(transfer_spec)).fingerprint() == transfer_spec.fingerprint()
    assert arrangement(nodes=(0, 0, 0, 0)).fingerprint() != transfer_spec.fingerprint()
    full = WeightNeeds(layouts=transfer_spec.needs, full_tensors=("layers.0",)).received()
    assert replace(transfer_spec, needs=full).fingerprint() != transfer_spec.fingerprint()


def test_no_relay_on_a_single_node():
    transfer_spec = arrangement(nodes=(0, 0, 0, 0))
    hops = [hop for rank in range(4) for r in transfer_spec.plan(rank).rounds for hop in r.hops[1:]]
    assert not any(hop.sends or hop.receives for hop in hops)
    assert not TransferRank(transfer_spec, 0).is_connected
