"""Heartbeats of ranks, which ranks count as missing, and the abort of a sync on all ranks."""

import json
import queue
import signal
import time
from dataclasses import asdict

import pytest

from megarl.errors import LostRankError, WeightSyncError
from megarl.reshard.transfer import sync_store
from megarl.reshard.transfer.heartbeat import BUSY_LIMITS, HeartbeatSpec, HeartbeatTracker, RankHeartbeat, SyncMonitor
from megarl.reshard.transfer.process_groups import (
    NCCL_ORDER,
    TransferGroup,
    abort_connect,
    connect_group,
)
from megarl.reshard.transfer.sync_store import open_store
from megarl.reshard.transfer.transport import SyncActivity, Transport
from tests.reshard import synthetic
from tests.reshard.planning.test_disaggregated import Ranks, arrangement
from tests.reshard.rank_process import RankProcess
from tests.time_limits import HANG_SECONDS

ABORT, SLACK = 2.0, 6.0
"""Seconds without a sign of life, and what a busy machine may add."""


def beat(number, **activity):
    return json.dumps(asdict(SyncActivity(**activity)) | {"beat": number}).encode()


def observe(*rounds):
    """Return what a tracker with a limit of 2 s says to the heartbeats of each second."""
    tracker = HeartbeatTracker(len(rounds[0]), 2.0, 1.0)
    return [tracker.observe(heartbeats, now) for now, heartbeats in enumerate(rounds)]


def test_rank_without_heartbeat_is_missing():
    """Also before the sync begins, and while another rank waits for it."""
    assert observe(*([beat(now), beat(1), beat(now, waits_for=(1,))] for now in range(4))) == [
        "",
        "",
        "rank 1 gave no sign of life for 2 s",
        "rank 1 gave no sign of life for 2 s",
    ]


def test_slow_heartbeats_are_not_missing():
    assert observe(*([beat(now // 2)] for now in range(8))) == [""] * 8


def test_time_in_which_nobody_looked_does_not_count():
    """The machine of the controller and some ranks was too busy."""
    tracker = HeartbeatTracker(1, 2.0, 0.5)
    assert [tracker.observe([beat(1)], now) for now in (0.0, 60.0)] == ["", ""]
    assert tracker.observe([beat(1)], 120.0) == "rank 0 gave no sign of life for 2 s"


def test_rank_that_waits_for_none_holds_the_others_up():
    running = {"num_syncs": 1, "is_active": True}
    waiting = running | {"waits_for": (2,)}
    said = observe(*([beat(now, **waiting), beat(now, **waiting), beat(now, **running)] for now in range(7)))
    assert said == [*[""] * 6, "no rank made progress for 6 s: the others wait for rank 2"]


def test_ranks_that_wait_for_each_other_are_named_by_progress():
    of_rank = [
        {"num_syncs": 4, "is_active": True, "progress": progress, "waits_for": peers}
        for progress, peers in ((7, (1,)), (3, (0, 2)), (7, (1,)))
    ]
    said = observe(*([beat(now, **activity) for activity in of_rank] for now in range(3)))
    assert said[-1] == "no rank made progress for 2 s: rank 1 waits for ranks 0, 2"


def test_progress_of_any_rank_is_progress():
    waiting = {"num_syncs": 1, "is_active": True, "waits_for": (1,)}
    assert observe(*([beat(now, **waiting), beat(now, **waiting, progress=now)] for now in range(6))) == [""] * 6


def test_ranks_may_begin_and_end_at_different_times():
    """Until all have begun, `weight_sync.timeout_seconds` applies."""
    waiting, idle = {"num_syncs": 2, "is_active": True, "waits_for": (1,)}, {"num_syncs": 1}
    assert observe(*([beat(now, **waiting), beat(now, **idle)] for now in range(5))) == [""] * 5
    ended = {"num_syncs": 2}
    assert observe(*([beat(now, **ended), beat(now, **ended)] for now in range(5))) == [""] * 5


@pytest.fixture(scope="module", params=["gloo", NCCL_ORDER])
def ranks(request):
    """Two trainer ranks and two engine ranks on another node, which relay to each other."""
    ranks = Ranks(arrangement(), request.param, timeout_seconds=20.0, abort_seconds=ABORT)
    ranks.connect_all()
    yield ranks
    ranks.close()


def assert_next_sync_is_complete(ranks, number):
    ranks.connect_all()
    with SyncMonitor(ranks.heartbeat):
        results = ranks.sync(number)
    assert [mismatched for _, mismatched in results] == [0] * 4
    assert [stats.bytes_received for stats, _ in results] == [0, 0, *[synthetic.MODEL_BYTES] * 2]


def failing_sync(ranks, fault, seconds=ABORT + SLACK):
    """Run a sync with a fault; return the errors of the other ranks, each of which has to come in time."""
    with SyncMonitor(ranks.heartbeat):
        outcomes = ranks.failing_sync(3, fault)
    for rank, outcome in outcomes.items():
        assert outcome.error is not None
        assert outcome.error.startswith(f"rank {rank}"), outcome.error
        assert outcome.seconds <= seconds
        assert outcome.buffers == 0
    return [outcome.error for outcome in outcomes.values()]


def assert_aborted(ranks, errors, reason):
    """Over gloo, a rank may notice first that the connection to another one is lost."""
    aborted = [f"the sync was aborted: {reason}" in error for error in errors]
    assert all(aborted) if ranks.backend == NCCL_ORDER else any(aborted), errors


@pytest.mark.parametrize("stalled", [0, 2])
def test_stalled_rank_aborts_the_sync_on_all_ranks(ranks, stalled):
    """No rank serves or sends again before all have connected again; the processes live."""
    errors = failing_sync(ranks, (signal.SIGSTOP, stalled))
    assert_aborted(ranks, errors, f"rank {stalled} gave no sign of life for {ABORT:g} s")
    ranks.ranks[stalled].signal(signal.SIGCONT)
    assert ranks.ranks[stalled].result().error.startswith(f"rank {stalled}")
    for rank in ranks.ranks:
        rank.begin("sync", 4)
        assert rank.result().error.startswith(f"rank {rank.rank} has no connections to the other ranks")
    assert_next_sync_is_complete(ranks, 5)


def test_dead_rank_aborts_the_sync_on_all_ranks(ranks):
    errors = failing_sync(ranks, (signal.SIGKILL, 3))
    if ranks.backend == NCCL_ORDER:  # over gloo, its connections break
        assert_aborted(ranks, errors, f"rank 3 gave no sign of life for {ABORT:g} s")
    ranks.replace(3)
    assert_next_sync_is_complete(ranks, 7)


def test_failed_rank_aborts_the_sync_on_all_ranks_at_once(ranks):
    errors = failing_sync(ranks, (WeightSyncError("no memory is left"), 1), seconds=SLACK)
    if ranks.backend == NCCL_ORDER:
        assert_aborted(ranks, errors, "no memory is left")
    assert ranks.ranks[1].result().error == "no memory is left"
    assert_next_sync_is_complete(ranks, 9)


def test_rank_that_makes_no_progress_aborts_the_sync(ranks):
    """A trainer rank that lives, but packs nothing for a long time."""
    limit = BUSY_LIMITS * ABORT
    errors = failing_sync(ranks, (1.5 * limit, 0), seconds=limit + SLACK)
    assert_aborted(ranks, errors, f"no rank made progress for {limit:g} s: the others wait for rank 0")
    assert "the sync was aborted" in ranks.ranks[0].result().error
    assert_next_sync_is_complete(ranks, 11)


class StoreOwner:
    """A process that holds a store."""

    def __init__(self, _):
        self._store = open_store("127.0.0.1")

    def port(self):
        return self._store.port


def poll_until_aborted(transport):
    for _ in range(1000):
        transport.raise_if_aborted()
        time.sleep(0.01)


def test_rank_notices_that_the_store_does_not_answer():
    owner = RankProcess(StoreOwner, 0)
    owner.wait_started()
    owner.begin("port")
    spec = HeartbeatSpec("127.0.0.1", owner.result().value, "lonely", 1, 0.5)
    transport = Transport(None)
    transport.start_heartbeat(lambda activity, abort: RankHeartbeat(spec, 0, activity, abort))
    time.sleep(1.0)
    transport.raise_if_aborted()
    owner.signal(signal.SIGSTOP)
    with pytest.raises(LostRankError, match="the store of the sync does not answer"):
        poll_until_aborted(transport)
    owner.close()


def test_connecting_ranks_do_not_wait_for_one_that_failed():
    store = open_store("127.0.0.1")
    group = TransferGroup("127.0.0.1", store.port, "halves", 2, 2 * HANG_SECONDS)
    abort_connect(group, store, "engine 0 died")
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="the connecting was aborted: engine 0 died"):
        connect_group(group, 0, "plan")
    assert time.monotonic() - began < HANG_SECONDS


def test_failure_is_passed_on_although_the_heartbeat_is_closed_at_once():
    store = open_store("127.0.0.1")
    for number in range(20):
        spec = HeartbeatSpec("127.0.0.1", store.port, f"sync {number}", 1, 8.0)
        transport, reasons = Transport(None), queue.Queue()
        beats = RankHeartbeat(spec, 0, transport.activity, reasons.put)
        beats.report_failure("no memory is left")
        beats.close()
        assert reasons.get(timeout=HANG_SECONDS) == "no memory is left"


def test_heartbeat_needs_its_store(monkeypatch):
    monkeypatch.setattr(sync_store, "CONNECT_SECONDS", 0.5)
    port = open_store("127.0.0.1").port
    with pytest.raises(WeightSyncError, match=rf"the store at 127\.0\.0\.1:{port} does not answer"):
        HeartbeatSpec("127.0.0.1", port, "nobody", 1, 1.0).open()
