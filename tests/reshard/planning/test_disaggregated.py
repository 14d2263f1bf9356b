"""Trainer ranks and engine ranks that share nothing but a store: real processes on gloo, some of which fail."""

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
from megarl.reshard.planning.disaggregated import Handover, HandoverRank
from megarl.reshard.transfer.process_groups import Meeting, join_group, open_store
from tests.reshard import synthetic
from tests.reshard.rank_process import HandoverMember, RankProcess, call
from tests.reshard.transfer.test_executor import value

BUCKET_BYTES = 16_384
TIMEOUT = 4.0
SLACK = 1.5
"""Seconds that a process on a busy machine may take to notice."""

SENDERS, RECEIVERS = (0, 1), (2, 3)


def arrangement(nodes=(0, 0, 1, 1), bucket_bytes=BUCKET_BYTES):
    """Trainer ranks that split the model; two engines with all of it, on a machine of their own."""
    return Handover(
        sources=synthetic.trainers(RankGrid(tp=len(nodes) - 2)),
        needs=tuple(synthetic.needs([GenerationPlace(0, 0, 0)], 1, 1).values()),
        num_engines=2,
        nodes=nodes,
        bucket_bytes=bucket_bytes,
    )


class Ranks:
    """All ranks, and the store at which they meet."""

    def __init__(self, handover):
        self.handover = handover
        self.store = open_store("127.0.0.1")
        self.ranks = [self.start(rank) for rank in range(self.handover.size)]
        self.meetings = 0
        for rank in self.ranks:
            rank.wait_started()

    def start(self, rank):
        return RankProcess(HandoverMember, rank, self.handover, value)

    def replace(self, rank):
        self.ranks[rank].close()
        self.ranks[rank] = self.start(rank)
        self.ranks[rank].wait_started()

    def meet(self):
        self.meetings += 1
        name = f"meeting {self.meetings}"
        call(self.ranks, "join", Meeting("127.0.0.1", self.store.port, name, self.handover.size, TIMEOUT))

    def sync(self, number, fault=None):
        return call(self.ranks, "sync", number, fault)

    def failing_sync(self, number, fault):
        """What the ranks say that did not fail themselves; by rank."""
        for rank in self.ranks:
            rank.begin("sync", number, fault)
        return {rank.rank: rank.result() for rank in self.ranks if rank.rank != fault[1]}

    def close(self):
        for rank in self.ranks:
            rank.close()


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(arrangement())
    ranks.meet()
    yield ranks
    ranks.close()


def test_three_syncs_are_bitwise_and_counted(ranks):
    for number in range(3):
        results = ranks.sync(number)
        assert [mismatched for _, mismatched in results] == [0] * 4
        for rank, (books, _) in enumerate(results):
            receives = rank in RECEIVERS
            planned = ranks.handover.plan(rank).rounds
            assert books.bytes_received == receives * synthetic.MODEL_BYTES
            assert books.bytes_delivered == sum(r.bytes_delivered for r in planned) == books.bytes_received
            assert books.bytes_sent == sum(hop.bytes_sent for r in planned for hop in r.hops)
            # each byte enters the engines' machine once, and half of it is handed on by either engine
            assert books.bytes_sent == synthetic.MODEL_BYTES / 2
            assert books.peak_extra_bytes <= 2 * BUCKET_BYTES
            assert books.buckets == (len(planned) if receives else 0)


def test_what_engines_load_themselves_comes_whole_and_in_bounded_memory(ranks):
    whole = ("layers.3", "layers.4", *(f"layers.{i}" for i in range(30, 40)))
    handover = replace(ranks.handover, whole=whole)
    assert [len(part.tensors) for part in handover.plan_whole(0)] == [5, 5, 2]
    call(ranks.ranks, "prepare", handover)
    ranks.meet()
    try:
        for number in (20, 21):
            results = ranks.sync(number)
            assert [mismatched for _, mismatched in results] == [0] * 4
            for rank, (books, _) in enumerate(results):
                assert books.bytes_received == (rank in RECEIVERS) * synthetic.MODEL_BYTES
                assert books.bytes_sent == synthetic.MODEL_BYTES / 2
                assert books.peak_extra_bytes <= 2 * BUCKET_BYTES
    finally:
        call(ranks.ranks, "prepare", ranks.handover)
        ranks.meet()


@pytest.mark.parametrize("whole", [(), ("layers.1", "layers.40")])
def test_each_missing_byte_enters_a_machine_once(whole):
    """Three engines of two TP ranks: one machine has one of them, another has two, the trainer's have none."""
    nodes = (0, 0, 1, 1, 2, 2, 3, 3, 3, 3)
    handover = Handover(
        sources=synthetic.trainers(RankGrid(tp=2, dp=2)),
        needs=tuple(synthetic.needs([GenerationPlace(0, 0, tp) for tp in range(2)], 1, 2).values()),
        num_engines=3,
        nodes=nodes,
        bucket_bytes=BUCKET_BYTES,
        whole=whole,
    )
    entering, sent, received = Counter(), 0, 0
    for rank in range(handover.size):
        for plan in (handover.plan(rank), *(part.rounds for part in handover.plan_whole(rank))):
            for hop in (hop for each in plan.rounds for hop in each.hops):
                sent += hop.bytes_sent
                received += sum(message.num_bytes for message in hop.receives)
                for message in hop.receives:
                    entering[nodes[rank]] += message.num_bytes * (nodes[message.source] != nodes[rank])
    assert entering == {2: synthetic.MODEL_BYTES, 3: synthetic.MODEL_BYTES}
    # TP ranks hold halves, and what is loaded whole goes to both of them
    twice = len(whole) * synthetic.MODEL_BYTES // synthetic.LAYERS
    assert sent == received == 3 * (synthetic.MODEL_BYTES + twice)


def test_a_slow_rank_still_gets_what_is_handed_on_to_it():
    """One tensor in a round, handed on in one direction: the fast rank has the next one while the slow one waits."""
    ranks = Ranks(arrangement(nodes=(0, 1, 1), bucket_bytes=8192))
    ranks.meet()
    for slow in (1, 2):
        assert [mismatched for _, mismatched in ranks.sync(slow, (0.01, slow))] == [0] * 3
    ranks.close()


def assert_all_say_whom_they_waited_for(outcomes, failed):
    """Every rank that is left, in time; one of them names the rank that failed, as the others' peers may give up."""
    for rank, outcome in outcomes.items():
        assert re.match(rf"rank {rank}: round [1-9]\d* of the weights: ", outcome.error), outcome.error
        assert outcome.seconds <= TIMEOUT + SLACK
        assert outcome.buffers == 0
    assert any(re.search(rf"ranks? (\d, )*{failed}\b", o.error.partition("weights: ")[2]) for o in outcomes.values())


def assert_repaired(ranks, number):
    ranks.meet()
    results = ranks.sync(number)
    assert [mismatched for _, mismatched in results] == [0] * 4
    assert [books.bytes_received for books, _ in results] == [0, 0, *[synthetic.MODEL_BYTES] * 2]


@pytest.mark.parametrize("stalled", [*SENDERS, *RECEIVERS])
def test_a_rank_that_stalls_is_named_and_the_next_sync_is_whole(ranks, stalled):
    outcomes = ranks.failing_sync(3, (signal.SIGSTOP, stalled))
    assert_all_say_whom_they_waited_for(outcomes, stalled)
    ranks.ranks[stalled].signal(signal.SIGCONT)
    late = ranks.ranks[stalled].result()
    assert late.error.startswith(f"rank {stalled}: round ")
    assert late.buffers == 0
    for rank in ranks.ranks:
        rank.begin("sync", 4)
        assert rank.result().error.startswith(f"rank {rank.rank} has no connections to the other ranks")
    assert_repaired(ranks, 5)


@pytest.mark.parametrize("killed", [1, 2])
def test_a_rank_that_dies_is_named_and_its_replacement_joins_the_others(ranks, killed):
    outcomes = ranks.failing_sync(6, (signal.SIGKILL, killed))
    assert_all_say_whom_they_waited_for(outcomes, killed)
    assert any(f"lost the connection to rank {killed} " in outcome.error for outcome in outcomes.values())
    assert all(outcome.seconds < TIMEOUT for outcome in outcomes.values())
    ranks.replace(killed)
    assert_repaired(ranks, 7)


def test_a_rank_that_does_not_join_is_not_waited_for_long():
    store = open_store("127.0.0.1")
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join the others at 127\.0\.0\.1:\d+ within 1 s"):
        join_group(Meeting("127.0.0.1", store.port, "alone", 2, 1.0), 0, "plan")


def test_a_store_that_is_gone_is_an_error():
    port = open_store("127.0.0.1").port
    with pytest.raises(WeightSyncError, match=rf"could not join the others at 127\.0\.0\.1:{port} within 1 s"):
        join_group(Meeting("127.0.0.1", port, "nobody", 2, 1.0), 0, "plan")


def test_ranks_with_different_plans_do_not_connect():
    store, errors = open_store("127.0.0.1"), []
    meeting = Meeting("127.0.0.1", store.port, "two plans", 2, 1.0)
    for rank, bucket_bytes in enumerate((8192, 16_384)):
        with pytest.raises(WeightSyncError) as error:
            HandoverRank(arrangement(bucket_bytes=bucket_bytes), rank).join(meeting)
        errors.append(str(error.value))
    assert "rank 0 of 2 could not join the others" in errors[0]
    assert errors[1] == "rank 1 of 2 has planned something else than a rank that it joins"


def test_a_fingerprint_survives_the_way_to_another_process():
    handover = arrangement()
    assert pickle.loads(pickle.dumps(handover)).fingerprint() == handover.fingerprint()
    assert arrangement(nodes=(0, 0, 0, 0)).fingerprint() != handover.fingerprint()
    assert replace(handover, whole=("layers.0",)).fingerprint() != handover.fingerprint()


def test_trainer_and_engine_need_the_same_dtype():
    handover = arrangement()
    half = {name: replace(spec, dtype="bfloat16") for name, spec in synthetic.TENSORS.items()}
    needs = tuple(WeightLayout(half, layout.pieces) for layout in handover.needs)
    with pytest.raises(WeightSyncError, match=r"layers\.0: the engines hold bfloat16, the trainer float32"):
        replace(handover, needs=needs).plan(0)


def test_ranks_on_one_machine_hand_nothing_on():
    handover = arrangement(nodes=(0, 0, 0, 0))
    hops = [hop for rank in range(4) for r in handover.plan(rank).rounds for hop in r.hops[1:]]
    assert not any(hop.sends or hop.receives for hop in hops)
    assert not HandoverRank(handover, 0).joined
