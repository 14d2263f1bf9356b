"""Posting of messages and collectives, errors for messages that do not arrive, and counted bytes; fake works."""

import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megarl.errors import LostRankError, WeightSyncError
from megarl.reshard.transfer import transport as transport_module
from megarl.reshard.transfer.transport import Deadline, InFlight, Transport, wait_for
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS

CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch):
    """Only waits for works take time, on `CLOCK`."""
    monkeypatch.setattr(transport_module, "time", SimpleNamespace(monotonic=lambda: CLOCK.now))


class Work:
    """A fake work that completes some seconds after its creation, or fails."""

    def __init__(self, seconds=0.0, broken=""):
        self._end, self._broken, self.waits = CLOCK.now + seconds, broken, 0

    def wait(self, timeout=timedelta(days=1)):
        self.waits += 1
        if self._broken:
            raise RuntimeError(self._broken)
        left = max(self._end - CLOCK.now, 0.0)
        CLOCK.now += min(left, timeout.total_seconds())
        if left > timeout.total_seconds():
            raise RuntimeError("Timed out waiting")
        return True


def in_flight(work, peer, *, is_receive):
    return InFlight(work, (peer,), is_receive, Transport())


def test_timeout_names_only_the_late_senders_or_else_the_receivers():
    messages = [
        in_flight(Work(), 1, is_receive=True),
        in_flight(Work(9), 2, is_receive=True),
        in_flight(Work(9), 4, is_receive=True),
    ]
    messages += [in_flight(Work(), 5, is_receive=True), in_flight(Work(9), 6, is_receive=False)]
    with expect_error(WeightSyncError, "2", "4", "0.1", "nothing", "within"):
        wait_for(messages, Deadline(0.1))
    with expect_error(WeightSyncError, "6", "0.1", "nothing", "within"):
        wait_for(messages[4:], Deadline(0.1))


GLOO_WORDS = "[/gloo/pair.cc:5] Connection closed by peer [::1]:80. This is typically caused by a crash. GLHF!\nmore"


def test_broken_connection_fails_at_once():
    messages = [in_flight(Work(broken=GLOO_WORDS), 3, is_receive=True)]
    message = r"^lost the connection to rank 3 \(Connection closed by peer \[::1\]:80\)$"
    with pytest.raises(WeightSyncError, match=message):
        wait_for(messages, Deadline(9))


def test_one_deadline_covers_all_waits():
    deadline = Deadline(3)
    wait_for([in_flight(Work(2), 1, is_receive=True)], deadline)
    with expect_error(WeightSyncError, "1", "3", "nothing", "within"):
        wait_for([in_flight(Work(2), 1, is_receive=True)], deadline)
    wait_for([in_flight(Work(), 1, is_receive=True)], deadline)


def test_each_message_is_waited_for_once():
    message = in_flight(Work(), 1, is_receive=False)
    for _ in range(2):
        wait_for([message], Deadline(None))
    assert message.work.waits == 1


class Group:
    """A fake process group that records its calls."""

    def __init__(self, refuses=None):
        self.calls, self._refuses = [], refuses

    def send(self, tensors, rank, tag):
        return self._note("send", tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        return self._note("recv", tensors, rank, tag)

    def _note(self, call, tensors, rank, tag):
        if rank == self._refuses:
            raise RuntimeError("Pair is broken")
        self.calls.append((call, [t.nbytes for t in tensors], rank, tag))
        return Work()

    def _start_coalescing(self, device):
        self.calls.append(("start", device.type))

    def _end_coalescing(self, device):
        self.calls.append(("end", device.type))
        return Work()

    def abort(self):
        self.calls.append("abort")


A, B = torch.zeros(2), torch.zeros(3)


def test_receives_are_posted_before_sends():
    group = Group()
    received, sent = Transport(group, coalesces=False).start([(A, 1)], [(B, 2)])
    assert group.calls == [("recv", [12], 2, 0), ("send", [8], 1, 0)]
    assert [(m.peers, m.is_receive) for m in (*received, *sent)] == [((2,), True), ((1,), False)]


def test_coalesced_messages_are_waited_for_together():
    group = Group()
    received, sent = Transport(group, coalesces=True).start([(A, 3)], [(B, 2)])
    assert group.calls == [("start", "cpu"), ("recv", [12], 2, 0), ("send", [8], 3, 0), ("end", "cpu")]
    assert received == sent
    assert received[0].peers == (2, 3)


def test_error_for_broken_connection_names_the_rank():
    with expect_error(WeightSyncError, "7 (Pair", "connection"):
        Transport(Group(refuses=7), coalesces=False).start([(A, 1), (A, 7)], [])


@pytest.mark.parametrize("is_exclusive", [True, False])
def test_closed_transport_rejects_messages_and_aborts_an_exclusive_group(is_exclusive):
    group = Group()
    transport = Transport(group, coalesces=True, is_exclusive=is_exclusive)
    for _ in range(2):
        transport.close()
    assert group.calls == ["abort"] * is_exclusive
    with expect_error(WeightSyncError, "connections", "closed"):
        transport.start([(A, 1)], [])


def test_connections_are_not_closed_while_messages_are_posted(monkeypatch):
    """Over gloo, a message on a connection that another thread has closed never ends."""
    group, closing, threads = Group(), threading.Event(), []
    transport = Transport(group, coalesces=False, is_exclusive=True)
    monkeypatch.setattr(transport_module, "close_gloo_connections", lambda _: closing.set())
    post = group.recv

    def abort_meanwhile(*message):
        threads.append(threading.Thread(target=transport.abort, args=("for a test",)))
        threads[0].start()
        assert not closing.wait(0.1)
        return post(*message)

    group.recv = abort_meanwhile
    transport.start([(A, 1)], [(B, 2)])
    threads[0].join(HANG_SECONDS)
    assert closing.is_set()
    assert [name for name, *_ in group.calls] == ["recv", "send"]
    with expect_error(LostRankError, "aborted", "for a test"):
        transport.start([(A, 1)], [])


RANKS = [3, 5, 6]
MEMBER = 1
GROUP = Mock(**{"rank.return_value": MEMBER, "size.return_value": len(RANKS)})
"""A process group of `RANKS`, of which this process is member 1, global rank 5."""


@pytest.fixture
def events(monkeypatch):
    """Return the calls of torch.distributed, which stands for NCCL: one work per coalesced group of calls."""
    found = []

    @contextmanager
    def coalescing_manager(group, device, *, async_ops):
        assert async_ops
        found.append("begin")
        yield SimpleNamespace(works=("work",))
        found.append("end")

    def record(name):
        def call(*_, async_op, **__):
            assert async_op
            found.append(name)

        return call

    monkeypatch.setattr(transport_module.distributed_c10d, "_coalescing_manager", coalescing_manager)
    monkeypatch.setattr(transport_module.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(transport_module.dist, "get_rank", lambda: RANKS[MEMBER])
    monkeypatch.setattr(transport_module.dist, "get_process_group_ranks", lambda _: RANKS)
    for name in ("all_gather_into_tensor", "broadcast"):
        monkeypatch.setattr(transport_module.dist, name, record(name))
    return found


def test_all_gathers_are_one_call(events):
    outs, transport = [torch.empty(3 * n, dtype=torch.uint8) for n in (4, 10)], Transport()
    (started,) = transport.start_all_gathers([(out, out[: len(out) // 3]) for out in outs], GROUP)
    assert events == ["begin", "all_gather_into_tensor", "all_gather_into_tensor", "end"]
    assert (started.work, started.peers) == ("work", (3, 6))
    assert (transport.stats.bytes_sent, transport.stats.bytes_received, transport.stats.collectives) == (28, 28, 2)


def test_broadcasts_are_one_call(events):
    tensors, transport = [torch.empty(n, dtype=torch.uint8) for n in (4, 10, 100)], Transport()
    (started,) = transport.start_broadcasts(list(zip(tensors, [5, 3, 6], strict=True)), GROUP)
    assert events == ["begin", "broadcast", "broadcast", "broadcast", "end"]
    assert (started.work, started.peers) == ("work", (3, 6))
    assert (transport.stats.bytes_sent, transport.stats.bytes_received, transport.stats.collectives) == (2 * 4, 110, 3)
    assert transport.start_broadcasts([], GROUP) == []
