"""Groups of otherwise unrelated processes: connecting, messages over gloo or NCCL, and heartbeats."""

import json
import os
import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from benchmarks.reshard.nccl_order import NcclOrderTransport
from megarl.errors import LostRankError, WeightSyncError
from megarl.reshard.transfer import commit_decision, heartbeat, process_groups
from megarl.reshard.transfer import transport as transport_module
from megarl.reshard.transfer.commit_decision import open_store
from megarl.reshard.transfer.heartbeat import HeartbeatSpec, HeartbeatTracker, RankHeartbeat, SyncActivity
from megarl.reshard.transfer.process_groups import TransferGroup, connect_group
from megarl.reshard.transfer.transport import Deadline, Transport, wait_for
from tests.errors import expect_error
from tests.megatron.ranks import run_ranks
from tests.reshard.rank_process import RankProcess
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until


def exchange(port, backend):
    """Exchange two tensors with the other rank; return those received."""
    rank = int(os.environ["RANK"])
    device = "cuda" if backend == "nccl" else "cpu"
    transport = connect_group(
        TransferGroup("127.0.0.1", port, "exchange", 2, timeout_seconds=HANG_SECONDS, backend=backend), rank, "plan"
    )
    mine = [torch.full((3,), 10.0 * rank + n, device=device) for n in range(2)]
    theirs = [torch.zeros(3, device=device) for _ in range(2)]
    other = 1 - rank
    received, sent = transport.start([(tensor, other) for tensor in mine], [(tensor, other) for tensor in theirs])
    wait_for([*received, *sent], Deadline(HANG_SECONDS))
    got = [tensor.tolist() for tensor in theirs]
    transport.close()
    return got


@pytest.mark.parametrize("backend", ["gloo", NcclOrderTransport, pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_unrelated_processes_exchange_tensors(backend, tmp_path):
    store = open_store("127.0.0.1")
    device = "cuda" if backend == "nccl" else "cpu"
    assert run_ranks(exchange, 2, tmp_path, store.port, backend, device=device) == [[10.0] * 3, [11.0] * 3]


@pytest.mark.parametrize("backend", ["gloo", NcclOrderTransport])
def test_no_rank_is_connected_before_all_are(backend):
    store = open_store("127.0.0.1")
    group = TransferGroup("127.0.0.1", store.port, "threads", 3, timeout_seconds=HANG_SECONDS, backend=backend)
    with ThreadPoolExecutor(3) as pool:
        connecting = [pool.submit(connect_group, group, rank, "plan") for rank in (0, 2)]
        assert wait_until(partial(PrefixStore(group.name, store).check, ["rank 0", "rank 2"]))
        assert not any(future.done() for future in connecting)
        connecting.append(pool.submit(connect_group, group, 1, "plan"))
    for future in connecting:
        future.result().close()


@pytest.mark.parametrize("backend", ["gloo", NcclOrderTransport])
def test_error_names_the_ranks_that_did_not_connect(backend, monkeypatch):
    store = open_store("127.0.0.1")
    # only the wait for the other ranks ends at the timeout
    monkeypatch.setattr(process_groups, "TCPStore", lambda host, port, timeout: dist.TCPStore(host, port))
    for rank, missing in enumerate(["1, 2, 3", "2, 3"]):
        with pytest.raises(WeightSyncError) as error:
            connect_group(
                TransferGroup("127.0.0.1", store.port, "alone", 4, timeout_seconds=0.2, backend=backend), rank, "plan"
            )
        said = str(error.value)
        assert said.startswith(f"rank {rank} of 4 could not connect to the other ranks at 127.0.0.1:")
        assert said.endswith(f"within 0.2 s: nothing from ranks {missing}")


@pytest.mark.parametrize("before", ["3", None])
def test_environment_is_restored_after_the_creation_of_a_group(before, monkeypatch):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, "3")
    if before is None:
        monkeypatch.delenv(name)
    with process_groups._errors_handled_by_transport():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before


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
    active = {"num_syncs": 4, "is_active": True}
    of_rank = ((7, (1,)), (3, (0, 2)), (7, (1,)))
    said = observe(*([beat(now, progress=n, waits_for=peers, **active) for n, peers in of_rank] for now in range(3)))
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
    monkeypatch.setattr(transport_module, "RankHeartbeat", lambda *args: beats.append(RankHeartbeat(*args)) or beats[0])
    transport.start_heartbeat(spec, 0)
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
    with expect_error(LostRankError, "answer", "store"):
        transport.raise_if_aborted()
    owner.close()


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
    monkeypatch.setattr(commit_decision, "CONNECT_SECONDS", 0.5)
    port = open_store("127.0.0.1").port
    with pytest.raises(WeightSyncError, match=rf"the store at 127\.0\.0\.1:{port} does not answer"):
        HeartbeatSpec("127.0.0.1", port, "nobody", 1, 1.0).open()
