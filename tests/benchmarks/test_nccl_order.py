"""The rules of NCCL that the transport over gloo imposes, each on its own."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.reshard.nccl_order import NcclOrderTransport
from megarl.errors import LostRankError, WeightSyncError
from megarl.reshard.transfer.transport import AT_ONCE, Deadline, Transport, wait_for
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until


def full(value, size=8):
    return torch.full((size,), float(value))


def make_groups(size):
    """Return a gloo group for each rank, in threads of this process."""
    store, never = dist.HashStore(), timedelta(seconds=UNREACHED_SECONDS)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, size, never), range(size)))


@pytest.fixture
def make_ranks():
    """Return a function that makes one transport per rank."""
    made = []

    def make(size, kind=NcclOrderTransport, **options):
        options = {"coalesces": False, "is_exclusive": True} if kind is Transport else {"is_connected": True} | options
        made.extend(kind(group, timeout_seconds=UNREACHED_SECONDS, **options) for group in make_groups(size))
        return made[-size:]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def is_stuck(make_ranks):
    """Return a function: whether messages have not completed when messages between other ranks, sent later, have."""

    def find(messages):
        a, b = make_ranks(2)
        for _ in range(10):
            assert is_done([*start(a, [(full(1), 1)]), *start(b, receives=[(full(0), 0)])])
        return not any(message.work.is_completed() for message in messages)

    return find


def is_done(messages):
    try:
        wait_for(messages, Deadline(UNREACHED_SECONDS))
    except WeightSyncError:
        return False
    return True


def start(transport, sends=(), receives=()):
    received, sent = transport.start(sends, receives)
    return [*received, *sent]


@pytest.mark.parametrize("kind", [NcclOrderTransport, Transport])
def test_group_starts_when_the_previous_one_has_ended(make_ranks, is_stuck, kind):
    """Two ranks that receive from each other before they send stop here, and do not over plain gloo."""
    ranks, arrived = make_ranks(2, kind), [full(0), full(0)]
    messages = [m for i, rank in enumerate(ranks) for m in start(rank, receives=[(arrived[i], 1 - i)])]
    messages += [m for i, rank in enumerate(ranks) for m in start(rank, [(full(i + 1), 1 - i)])]
    stops = kind is NcclOrderTransport
    assert is_stuck(messages) if stops else is_done(messages)
    assert torch.equal(arrived[0], full(0 if stops else 2))


def test_group_ends_when_all_its_messages_are_matched(make_ranks, is_stuck):
    a, b, c = make_ranks(3)
    from_b, from_c = full(0), full(0)
    messages = start(a, receives=[(from_b, 1), (from_c, 2)])
    assert is_done(start(b, [(full(1), 0)]))
    assert is_stuck(messages)
    assert is_done([*start(c, [(full(2), 0)]), *messages])
    assert (from_b[0], from_c[0]) == (1, 2)


def test_send_waits_for_its_receive(make_ranks, is_stuck):
    a, b = make_ranks(2)
    sent = start(a, [(full(1, 1), 1)])
    assert is_stuck(sent)
    assert is_done([*start(b, receives=[(full(0, 1), 0)]), *sent])


def test_first_group_needs_every_rank(make_ranks, is_stuck):
    a, b, c = make_ranks(3, is_connected=False)
    arrived = full(0)
    messages = [*start(a, [(full(1), 1)]), *start(b, receives=[(arrived, 0)])]
    assert is_stuck(messages)
    assert start(c) == []  # a rank without messages posts nothing
    assert is_stuck(messages)
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
    message = r"^rank 0 could not connect to the other ranks: nothing from rank 1 within 0\.2 s$"
    with pytest.raises(WeightSyncError, match=message):
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


def test_aborted_group_never_writes(make_ranks, is_stuck):
    a, b = make_ranks(2)
    arrived = full(0)
    messages = start(a, receives=[(arrived, 1)])
    a.close()
    with expect_error(WeightSyncError, "communicator", "aborted"):
        wait_for(messages, Deadline(UNREACHED_SECONDS))
    assert is_stuck(start(b, [(full(1), 0)]))
    assert torch.equal(arrived, full(0))
    with expect_error(WeightSyncError, "connections", "closed"):
        a.start([], [(arrived, 1)])


@pytest.mark.parametrize("kind", [NcclOrderTransport, Transport])
def test_abort_is_local(make_ranks, is_stuck, kind):
    """Over plain gloo the other rank notices at once."""
    a, b = make_ranks(2, kind)
    messages = start(b, receives=[(full(0), 0)])
    a.close()
    if kind is NcclOrderTransport:
        assert is_stuck(messages)
    else:
        with expect_error(WeightSyncError, "0", "connection"):
            wait_for(messages, Deadline(UNREACHED_SECONDS))


def test_abort_ends_waits_although_other_connections_are_broken(make_ranks):
    """Over plain gloo, where a wait is in another thread, since there is no other way to look at a message."""
    a, b, c = make_ranks(3, Transport)
    messages = start(c, receives=[(full(0), 1)])
    a.close()
    with pytest.raises(WeightSyncError):
        wait_for(start(c, receives=[(full(0), 0)]), Deadline(UNREACHED_SECONDS))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(is_done, messages)
        assert wait_until(lambda: c.activity.waits_for == (1,))
        c.close()
        assert not waiting.result()
    b.close()


def test_lost_rank_stops_only_the_groups_that_need_it(make_ranks, is_stuck):
    a, b, c = make_ranks(3)
    c.close()
    received = full(0)
    assert is_done([*start(a, [(full(1), 1)]), *start(b, receives=[(received, 0)])])
    lost = start(a, [(full(2), 1), (full(2), 2)])
    assert is_done(start(b, receives=[(received, 0)]))
    assert is_stuck(lost)
    assert torch.equal(received, full(2))


@pytest.mark.parametrize("kind", [NcclOrderTransport, Transport])
def test_abort_ends_waits_that_gloo_never_ends(kind):
    """As those for a message that is partly read, or partly written, when its connection breaks."""
    test_is_over = threading.Event()
    work = Mock(**{"wait.side_effect": lambda left=None: left != AT_ONCE and test_is_over.wait()})
    group = Mock(**{"size.return_value": 2, "rank.return_value": 0, "recv.return_value": work})
    options = {"coalesces": False, "is_exclusive": True} if kind is Transport else {"is_connected": True}
    rank = kind(group, timeout_seconds=UNREACHED_SECONDS, **options)
    messages = start(rank, receives=[(full(0), 1)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for, messages, Deadline(UNREACHED_SECONDS))
        assert wait_until(lambda: work.wait.called and rank.activity.waits_for == (1,))
        rank.abort("for a test")
        with expect_error(LostRankError, "for a test"):
            waiting.result(HANG_SECONDS)
    test_is_over.set()


def test_abort_ends_all_threads(make_ranks):
    def own_threads():  # the others wait for messages of any communicator
        return {thread for thread in threading.enumerate() if thread.name != "gloo wait"}

    before = own_threads()
    a, b = make_ranks(2, watchdog_seconds=UNREACHED_SECONDS)
    start(a, receives=[(full(0), 1)])
    start(b, receives=[(full(0), 0)])
    assert len(own_threads() - before) == 4
    for rank in (a, b):
        rank.close()
    assert own_threads() == before


def test_wait_counts_from_the_start_of_the_work_and_marks_it_as_failed(make_ranks):
    a, _ = make_ranks(2)
    (message, _) = start(a, receives=[(full(0), 1)])
    message.work.started_at -= UNREACHED_SECONDS
    with expect_error(RuntimeError, "done"):
        message.work.wait(timedelta(seconds=UNREACHED_SECONDS))
    assert message.work.is_completed()


def test_wait_without_timeout_reports_no_failure(make_ranks):
    a, _ = make_ranks(2)
    (message, _) = start(a, receives=[(full(0), 1)])
    a.close()
    assert message.work.wait()
    with expect_error(WeightSyncError, "communicator", "aborted"):
        wait_for([message], Deadline(UNREACHED_SECONDS))


def lonely_rank(watchdog_seconds, how, is_ended):
    """Wait for a rank that never sends, and for the watchdog if it ends the process; then exit with 7."""
    transport = NcclOrderTransport(make_groups(2)[0], is_connected=True, watchdog_seconds=watchdog_seconds)
    (message, _) = start(transport, receives=[(full(0), 1)])
    if how == "poll":
        with expect_error(WeightSyncError, "1", "nothing"):
            wait_for([message], Deadline(UNREACHED_SECONDS if is_ended else 0.1))
    else:
        with expect_error(RuntimeError, "done"):
            message.work.wait(timedelta(seconds=0.1))
        time.sleep(UNREACHED_SECONDS if is_ended else 0)
    os._exit(7) if how == "wait" else exit(7)


@pytest.mark.parametrize(
    ("watchdog_seconds", "how", "is_ended"),
    [
        (0.3, "poll", True),
        (UNREACHED_SECONDS, "wait", True),
        (UNREACHED_SECONDS, "poll", False),
        (None, "poll", False),
        (None, "wait", False),
    ],
)
def test_watchdog_ends_the_process_unless_errors_are_handled(watchdog_seconds, how, is_ended):
    """A process exits although its threads wait in gloo."""
    multiprocessing.set_forkserver_preload(["tests.megatron.preloaded"])
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=lonely_rank, args=(watchdog_seconds, how, is_ended))
    process.start()
    process.join(HANG_SECONDS)
    assert process.exitcode == (-signal.SIGABRT if is_ended else 7)
