"""The rules of NCCL that the transport over gloo imposes, each on its own."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.reshard.transfer.nccl_order import NcclOrderTransport
from megarl.reshard.transfer.transport import Deadline, Transport, wait_for
from tests.time_limits import HANG_SECONDS

STUCK_SECONDS = 1.0
"""Time after which a group of messages counts as stuck; without its cause it takes milliseconds."""


def full(value, size=8):
    return torch.full((size,), float(value))


@pytest.fixture
def make_ranks():
    """Return a function that makes one transport per rank, over gloo between threads."""
    made = []

    def make(size, kind=NcclOrderTransport, **options):
        store = dist.HashStore()
        with ThreadPoolExecutor(size) as pool:
            groups = list(
                pool.map(
                    lambda rank: dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=HANG_SECONDS)), range(size)
                )
            )
        options = (
            {"is_connected": True} | options
            if kind is NcclOrderTransport
            else {"coalesces": False, "is_exclusive": True}
        )
        made.extend(kind(group, timeout_seconds=HANG_SECONDS, **options) for group in groups)
        return made[-size:]

    yield make
    for transport in made:
        transport.close()


def is_done(messages, seconds=HANG_SECONDS):
    try:
        wait_for(messages, Deadline(seconds))
    except WeightSyncError:
        return False
    return True


def start(transport, sends=(), receives=()):
    received, sent = transport.start(sends, receives)
    return [*received, *sent]


def test_messages_arrive(make_ranks):
    a, b = make_ranks(2)
    first, second = full(0), full(0, 3)
    sent = start(a, [(full(1), 1), (full(2, 3), 1)])
    assert is_done([*start(b, receives=[(first, 0), (second, 0)]), *sent])
    assert torch.equal(first, full(1))
    assert torch.equal(second, full(2, 3))


@pytest.mark.parametrize("kind", [NcclOrderTransport, Transport])
def test_group_starts_when_the_previous_one_has_ended(make_ranks, kind):
    """Two ranks that receive from each other before they send stop here, and do not over plain gloo."""
    ranks, arrived = make_ranks(2, kind), [full(0), full(0)]
    received = [start(rank, receives=[(arrived[i], 1 - i)]) for i, rank in enumerate(ranks)]
    sent = [start(rank, [(full(i + 1), 1 - i)]) for i, rank in enumerate(ranks)]
    is_stuck = kind is NcclOrderTransport
    assert is_done(received[0], STUCK_SECONDS) is not is_stuck
    assert is_done(received[1], STUCK_SECONDS) is not is_stuck
    assert is_done(sent[0], STUCK_SECONDS) is not is_stuck
    assert torch.equal(arrived[0], full(0 if is_stuck else 2))


def test_group_ends_when_all_its_messages_are_matched(make_ranks):
    a, b, c = make_ranks(3)
    from_b, from_c = full(0), full(0)
    messages = start(a, receives=[(from_b, 1), (from_c, 2)])
    assert is_done(start(b, [(full(1), 0)]))
    assert not is_done(messages, STUCK_SECONDS)
    assert is_done([*start(c, [(full(2), 0)]), *messages])
    assert (from_b[0], from_c[0]) == (1, 2)


def test_send_waits_for_its_receive(make_ranks):
    a, b = make_ranks(2)
    sent = start(a, [(full(1, 1), 1)])
    assert not is_done(sent, STUCK_SECONDS)
    assert is_done([*start(b, receives=[(full(0, 1), 0)]), *sent])


def test_first_group_needs_every_rank(make_ranks):
    a, b, c = make_ranks(3, is_connected=False)
    arrived = full(0)
    messages = [*start(a, [(full(1), 1)]), *start(b, receives=[(arrived, 0)])]
    assert not is_done(messages, STUCK_SECONDS)
    assert start(c) == []  # a rank without messages posts nothing
    assert not is_done(messages, STUCK_SECONDS)
    start(c, receives=[(full(0), 0)])  # also if nobody sends it anything
    assert is_done(messages)
    assert torch.equal(arrived, full(1))


def test_connected_ranks_need_not_take_part(make_ranks):
    a, b, c = make_ranks(3, is_connected=False)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: rank.connect(), (a, b, c)))
    assert is_done([*start(a, [(full(1), 1)]), *start(b, receives=[(full(0), 0)])])


def test_connect_names_ranks_that_are_missing(make_ranks):
    a, _ = make_ranks(2, is_connected=False)
    a.timeout_seconds = 0.2
    with pytest.raises(
        WeightSyncError, match=r"^rank 0 could not connect to the other ranks: nothing from rank 1 within 0\.2 s$"
    ):
        a.connect()


def test_data_is_read_and_written_while_the_group_runs(make_ranks):
    a, b = make_ranks(2)
    blocked = start(a, receives=[(full(0), 1)])
    data, arrived = full(1), full(0)
    sent = start(a, [(data, 1)])
    data.fill_(2)  # changed after it was posted
    assert is_done(start(b, [(full(0), 0)]))
    received = start(b, receives=[(arrived, 0)])
    assert is_done([*blocked, *sent, *received])
    assert torch.equal(arrived, full(2))


def test_aborted_group_never_writes(make_ranks):
    a, b = make_ranks(2)
    arrived = full(0)
    messages = start(a, receives=[(arrived, 1)])
    a.close()
    with pytest.raises(WeightSyncError, match="the communicator was aborted"):
        wait_for(messages, Deadline(HANG_SECONDS))
    start(b, [(full(1), 0)])
    time.sleep(STUCK_SECONDS)
    assert torch.equal(arrived, full(0))
    with pytest.raises(WeightSyncError, match="the connections were closed"):
        a.start([], [(arrived, 1)])


@pytest.mark.parametrize("kind", [NcclOrderTransport, Transport])
def test_abort_is_local(make_ranks, kind):
    """Over plain gloo the other rank notices at once."""
    a, b = make_ranks(2, kind)
    messages = start(b, receives=[(full(0), 0)])
    a.close()
    if kind is NcclOrderTransport:
        assert not is_done(messages, STUCK_SECONDS)
        assert not messages[0].work.is_completed()
    else:
        with pytest.raises(WeightSyncError, match="lost the connection to rank 0"):
            wait_for(messages, Deadline(HANG_SECONDS))


@pytest.mark.parametrize("kind", [NcclOrderTransport, Transport])
def test_abort_ends_waits_although_other_connections_are_broken(make_ranks, kind):
    a, b, c = make_ranks(3, kind)
    messages = start(c, receives=[(full(0), 1)])
    a.close()
    time.sleep(0.2)
    began = time.monotonic()
    if kind is Transport:  # a wait in another thread, as gloo has no other way to look at a message
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(is_done, messages, 2 * HANG_SECONDS)
            time.sleep(0.2)
            c.close()
            assert waiting.exception() or not waiting.result()
    else:
        c.close()
        assert not is_done(messages, 2 * HANG_SECONDS)
    assert time.monotonic() - began < HANG_SECONDS
    b.close()


def test_lost_rank_stops_only_the_groups_that_need_it(make_ranks):
    a, b, c = make_ranks(3)
    c.close()
    received = full(0)
    assert is_done([*start(a, [(full(1), 1)]), *start(b, receives=[(received, 0)])])
    lost = start(a, [(full(2), 1), (full(2), 2)])
    assert is_done(start(b, receives=[(received, 0)]))
    assert not is_done(lost, STUCK_SECONDS)
    assert torch.equal(received, full(2))


def test_abort_ends_all_threads(make_ranks):
    before = set(threading.enumerate())
    a, b = make_ranks(2, watchdog_seconds=60.0)
    start(a, receives=[(full(0), 1)])
    start(b, receives=[(full(0), 0)])
    assert len(set(threading.enumerate()) - before) == 4
    for rank in (a, b):
        rank.close()
    assert set(threading.enumerate()) == before


def test_wait_counts_from_the_start_of_the_work_and_marks_it_as_failed(make_ranks):
    a, _ = make_ranks(2)
    (message, _) = start(a, receives=[(full(0), 1)])
    time.sleep(2.0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="not done"):
        message.work.wait(timedelta(seconds=2.0))
    assert time.monotonic() - begin < 1.5
    assert message.work.is_completed()


def test_wait_without_timeout_reports_no_failure(make_ranks):
    a, _ = make_ranks(2)
    (message, _) = start(a, receives=[(full(0), 1)])
    a.close()
    assert message.work.wait()
    with pytest.raises(WeightSyncError, match="the communicator was aborted"):
        wait_for([message], Deadline(HANG_SECONDS))


def lonely_rank(watchdog_seconds, how):
    """Wait for a rank that never sends; then exit with 7."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        group, _other = pool.map(
            lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=HANG_SECONDS)), range(2)
        )
    transport = NcclOrderTransport(group, is_connected=True, watchdog_seconds=watchdog_seconds)
    messages = start(transport, receives=[(full(0), 1)])
    if how == "poll":
        is_done(messages, 1.0)
    elif how == "wait":
        with pytest.raises(RuntimeError, match="not done"):
            messages[0].work.wait(timedelta(seconds=0.2))
        time.sleep(0.8)
    os._exit(7) if how == "wait" else exit(7)


@pytest.mark.parametrize(
    ("watchdog_seconds", "how", "exit_code"),
    [
        (0.3, "poll", -signal.SIGABRT),
        (60.0, "wait", -signal.SIGABRT),
        (60.0, "poll", 7),
        (None, "poll", 7),
        (None, "wait", 7),
    ],
)
def test_watchdog_ends_the_process_unless_errors_are_handled(watchdog_seconds, how, exit_code):
    """A process exits although its threads wait in gloo."""
    multiprocessing.set_forkserver_preload(["tests.megatron.preloaded"])
    process = multiprocessing.get_context("forkserver").Process(target=lonely_rank, args=(watchdog_seconds, how))
    process.start()
    process.join(HANG_SECONDS)
    assert process.exitcode == exit_code
