"""Heartbeats of ranks, and which ranks count as missing."""

import json
import queue
import signal
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from megarl.errors import LostRankError, WeightSyncError
from megarl.reshard.transfer import heartbeat, sync_store
from megarl.reshard.transfer.heartbeat import HeartbeatSpec, HeartbeatTracker, RankHeartbeat
from megarl.reshard.transfer.process_groups import TransferGroup, abort_connect, connect_group
from megarl.reshard.transfer.sync_store import open_store
from megarl.reshard.transfer.transport import SyncActivity, Transport
from tests.reshard.rank_process import RankProcess
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until


def beat(number, **activity):
    return json.dumps(asdict(SyncActivity(**activity)) | {"beat": number}).encode()


def observe(*rounds):
    """Return what a tracker with a limit of 2 s says to the heartbeats of each second."""
    tracker = HeartbeatTracker(len(rounds[0]), 2.0, 1.0)
    return [tracker.observe(heartbeats, now) for now, heartbeats in enumerate(rounds)]


def test_rank_without_heartbeat_is_missing():
    """Also before the sync begins, and while another rank waits for it."""
    said = observe(*([beat(now), beat(1), beat(now, waits_for=(1,))] for now in range(4)))
    assert said == ["", "", *["rank 1 gave no sign of life for 2 s"] * 2]


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


WAITING = {"num_syncs": 2, "is_active": True, "waits_for": (1,)}
SOUND = {
    "slow heartbeats": lambda now: [beat(now // 2)],
    "progress of any rank": lambda now: [beat(now, **WAITING), beat(now, **WAITING, progress=now)],
    "not all have begun": lambda now: [beat(now, **WAITING), beat(now, num_syncs=1)],
    "all have ended": lambda now: [beat(now, num_syncs=2)] * 2,
}


@pytest.mark.parametrize("heartbeats", SOUND.values(), ids=SOUND)
def test_sound_ranks_are_not_aborted(heartbeats):
    """Until all have begun, `weight_sync.timeout_seconds` applies."""
    assert observe(*map(heartbeats, range(8))) == [""] * 8


class StoreOwner:
    """A process that holds a store."""

    def __init__(self, _):
        self._store = open_store("127.0.0.1")

    def port(self):
        return self._store.port


def test_rank_notices_that_the_store_does_not_answer(monkeypatch):
    owner = RankProcess(StoreOwner, 0)
    owner.wait_started()
    owner.begin("port")
    spec, clock = HeartbeatSpec("127.0.0.1", owner.result().value, "lonely", 1, 0.4), SimpleNamespace(now=0.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    beats, transport = [], Transport(None)
    transport.start_heartbeat(lambda *arguments: beats.append(RankHeartbeat(spec, 0, *arguments)) or beats[0])
    for _ in range(4):  # twice the limit in all
        clock.now += 0.2
        transport.raise_if_aborted()
        assert wait_until(lambda: beats[0]._last_contact == clock.now)
    owner.signal(signal.SIGSTOP)
    assert wait_until(owner.is_stopped_or_dead)

    def is_cut_off():
        clock.now += 0.2
        return beats[0].is_cut_off

    assert wait_until(is_cut_off)
    with pytest.raises(LostRankError, match="the store of the sync does not answer"):
        transport.raise_if_aborted()
    owner.close()


def test_connecting_ranks_do_not_wait_for_one_that_failed():
    store = open_store("127.0.0.1")
    group = TransferGroup("127.0.0.1", store.port, "halves", 2, UNREACHED_SECONDS)
    abort_connect(group, store, "engine 0 died")
    with pytest.raises(WeightSyncError, match="the connecting was aborted: engine 0 died"):
        connect_group(group, 0, "plan")


def test_failure_is_passed_on_although_the_heartbeat_is_closed_at_once():
    store = open_store("127.0.0.1")
    for number in range(20):
        spec = HeartbeatSpec("127.0.0.1", store.port, f"sync {number}", 1, UNREACHED_SECONDS)
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
