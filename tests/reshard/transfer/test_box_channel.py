"""Boxes between a trainer rank and an engine rank in two processes."""

import os
import signal
import threading
from contextlib import closing

import numpy as np
import pytest

from megarl.errors import WeightSyncError
from megarl.reshard.transfer import box_channel
from megarl.reshard.transfer.box_channel import (
    POLL_SECONDS,
    BoxOffer,
    BoxReceiver,
    BoxSender,
    decode_slots,
    encode_slots,
)
from megarl.reshard.transfer.bucket import BoxSlot, Bucket, SharedBuffer, map_bucket
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, wait_until

ROUNDS = [
    [BoxSlot("a", ((0, 2), (3, 5)), "float32", 0), BoxSlot("b", ((1, 4),), "bfloat16", 64)],
    [],
    [BoxSlot("a", ((2, 4), (3, 5)), "float32", 0), BoxSlot("scalar", (), "float32", 16)],
]


@pytest.mark.parametrize("rounds", [ROUNDS, [], [[], []]])
def test_slots_survive_encoding(rounds):
    assert decode_slots(encode_slots(rounds)) == rounds


@pytest.fixture
def sender():
    with closing(BoxSender("trainer rank 3", "engine 0 rank 1", ROUNDS, HANG_SECONDS)) as sender:
        yield sender


@pytest.fixture
def buffer():
    with closing(SharedBuffer(4096)) as buffer:
        yield buffer


def nothing():
    pass


def receive_all(offer, values):
    """Receive the rounds that have boxes, and append the first byte of each bucket to `values`."""
    receiver = BoxReceiver(offer)
    for index, slots in enumerate(offer.read_slots()):
        if slots:
            values.append(int(map_bucket(receiver.receive(index, HANG_SECONDS, nothing))[0]))
            receiver.acknowledge()
    return receiver


def accept(sender):
    """Begin a sync once the receiver has connected."""

    def begin():
        sender.begin()
        return sender._connection is not None

    assert wait_until(begin)


def bucket_of(buffer):
    return Bucket(buffer.path, buffer.num_bytes)


def test_rounds_arrive_in_order_and_the_bucket_is_free_once_copied(sender, buffer):
    values = []
    thread = threading.Thread(target=receive_all, args=(sender.offer, values))
    thread.start()
    accept(sender)
    for index in (0, 2):
        buffer.bytes[0] = index + 7
        sender.load_boxes(index, bucket_of(buffer))()
        assert values[-1] == index + 7
    sender.load_boxes(1, None)()
    thread.join()
    assert values == [7, 9]
    assert sender.failure == ""


def test_list_of_codes_arrives_before_its_rounds(sender, buffer):
    receiver = BoxReceiver(sender.offer)
    sender.begin()
    rounds = [np.array([[1, 2, 64]]), np.zeros((0, 3), np.int64), np.array([[0, 1, 8], [1, 5, 16]])]
    sender.expect_codes(rounds)
    sender.load_boxes(0, bucket_of(buffer))
    lines = receiver.receive_codes(HANG_SECONDS, nothing)
    assert lines.tolist() == [[0, 1, 2, 64], [2, 0, 1, 8], [2, 1, 5, 16]]
    assert receiver.receive(0, HANG_SECONDS, nothing).num_bytes == 4096
    sender.expect_codes([np.zeros((0, 3), np.int64)] * 3)
    with expect_error(WeightSyncError, "3", "2", "trainer", "instead"):
        receiver.receive(2, HANG_SECONDS, nothing)
    sender.expect_codes([np.zeros((0, 3), np.int64)] * 3)
    assert receiver.receive_codes(HANG_SECONDS, nothing).shape == (0, 4)
    sender.load_boxes(2, bucket_of(buffer))
    with expect_error(WeightSyncError, "2", "3", "trainer", "instead"):
        receiver.receive_codes(HANG_SECONDS, nothing)
    receiver.close()
    sender.expect_codes(rounds)
    assert "engine 0 rank 1 has closed its connection" in sender.failure


def in_child(work):
    """Run `work` in a forked process; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def hold(offer):
    """Connect and wait to be killed."""
    receiver = BoxReceiver(offer)
    receiver.receive(0, HANG_SECONDS, nothing)
    signal.pause()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_sender_survives_a_dead_or_stalled_receiver_and_serves_its_successor(sender, buffer, fault):
    pid = in_child(lambda: hold(sender.offer))
    accept(sender)
    wait = sender.load_boxes(0, bucket_of(buffer))
    os.kill(pid, fault)
    if fault == signal.SIGSTOP:
        sender.stall_seconds = 0.3
    wait()
    sender.stall_seconds = HANG_SECONDS
    assert "engine 0 rank 1" in sender.failure
    sender.load_boxes(2, bucket_of(buffer))()  # dropped
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    sender.begin()
    assert sender.failure == "engine 0 rank 1 has not connected"
    values, receiver = [], []
    thread = threading.Thread(target=lambda: receiver.append(receive_all(sender.offer, values)))
    thread.start()
    accept(sender)
    for index in (0, 2):
        buffer.bytes[0] = index
        sender.load_boxes(index, bucket_of(buffer))()
    thread.join()
    assert (sender.failure, values) == ("", [0, 2])
    sender.begin()  # the next sync uses the same connection
    wait = sender.load_boxes(0, bucket_of(buffer))
    receiver[0].receive(0, HANG_SECONDS, nothing)
    receiver[0].fail("a parameter has gone")
    wait()
    assert sender.failure == "engine 0 rank 1: a parameter has gone"


def test_time_until_an_engine_stops_generating_is_no_stall(sender, buffer):
    receiver, sender.stall_seconds = BoxReceiver(sender.offer), 0.0
    sender.begin()
    stopping = threading.Timer(5 * POLL_SECONDS, receiver.report_ready)
    stopping.start()
    sender.wait_ready(HANG_SECONDS)
    assert sender.failure == ""
    sender.load_boxes(0, bucket_of(buffer))()
    assert sender.failure == "engine 0 rank 1 did not copy its weights within 0 s"
    stopping.join()
    receiver.close()
    receiver = BoxReceiver(sender.offer)
    sender.begin()
    sender.wait_ready(0.0)
    assert sender.failure == "engine 0 rank 1 did not begin to receive weights within 0 s"


def test_receiver_names_a_sender_that_ends_is_late_or_out_of_order(sender, buffer):
    receiver = BoxReceiver(sender.offer)
    sender.begin()
    with expect_error(WeightSyncError, "0", "3", "0.2", "weights", "trainer"):
        receiver.receive(0, 0.2, nothing)
    sender.load_boxes(2, bucket_of(buffer))
    with expect_error(WeightSyncError, "2", "3", "0", "trainer", "instead"):
        receiver.receive(0, HANG_SECONDS, nothing)

    def aborted():
        raise WeightSyncError("aborted")

    with pytest.raises(WeightSyncError, match=r"^aborted$"):
        receiver.receive(0, HANG_SECONDS, aborted)
    sender.close()
    with expect_error(WeightSyncError, "3", "trainer", "aborted"):
        receiver.receive(0, HANG_SECONDS, nothing)
    with expect_error(WeightSyncError, "3", "connections", "trainer"):
        BoxReceiver(sender.offer)
    with expect_error(OSError, "No"):
        sender.offer.read_slots()


def test_processes_of_other_users_and_short_offers_are_refused(sender, monkeypatch):
    offer = sender.offer
    assert sender._listener.getsockname() == b"\0" + offer.address.encode()  # no file that would be left
    with expect_error(WeightSyncError, "100000", "needs", "bytes"):
        BoxOffer(offer.sender, offer.address, offer.path, 100_000).read_slots()
    monkeypatch.setattr(box_channel, "owner_of", lambda _: os.getuid() + 1)
    with expect_error(WeightSyncError, "belongs", "another"):
        BoxReceiver(offer)
    sender.begin()
    assert sender.failure == "engine 0 rank 1 has not connected"
